//! Numeric settings of prefetching as options of `weir prefetch`.

use clap::{Arg, ArgMatches};
use policy::prefetch::PrefetchSetting;

use crate::prefetch;

/// Option of a setting, under this name.
pub fn number(setting: PrefetchSetting, name: &'static str) -> Arg {
    let (value, parser) = if prefetch::is_size(setting) {
        ("SIZE", crate::size as fn(&str) -> _)
    } else {
        ("N", crate::count as _)
    };
    Arg::new(name).long(name).value_name(value).value_parser(parser)
}

/// Given settings, looked up by these names.
pub fn given(matches: &ArgMatches, name: fn(PrefetchSetting) -> &'static str) -> Vec<(PrefetchSetting, u64)> {
    let given = |setting: PrefetchSetting| Some((setting, *matches.get_one(name(setting))?));
    PrefetchSetting::ALL.into_iter().filter_map(given).collect()
}
