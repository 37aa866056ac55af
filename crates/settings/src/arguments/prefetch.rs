//! What is read ahead, as options: of `weir serve` and `weir bench` by their full names, and the
//! parts of `weir prefetch`'s.

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use policy::prefetch::{Mode, Setting, Settings};

use crate::{Place, PrefetchDraft, Said, prefetch};

/// The options of `weir serve`, where reading ahead is on by default, and `weir bench`, where it is
/// off.
#[derive(Clone, Debug, Default)]
pub struct LongArgs<const SERVE: bool> {
    mode: Option<Mode>,
    given: Vec<(Setting, u64)>,
}

impl<const SERVE: bool> LongArgs<SERVE> {
    const DEFAULT: Mode = if SERVE { Mode::Auto } else { Mode::Off };

    /// What it says of a disk, with its options as places.
    pub fn draft(&self) -> PrefetchDraft {
        let number = |&(setting, value): &(Setting, u64)| {
            Said::new((setting, value), Place::option(setting.name(), prefetch::show(setting, value)))
        };
        let mode = self.mode.unwrap_or(Self::DEFAULT);
        PrefetchDraft {
            mode: Some(Said::new(mode, Place::option(prefetch::MODE, mode))),
            numbers: self.given.iter().map(number).collect(),
        }
    }
}

impl<const SERVE: bool> Args for LongArgs<SERVE> {
    fn augment_args(command: Command) -> Command {
        let mode = Arg::new(prefetch::MODE)
            .long(prefetch::MODE)
            .value_name("MODE")
            .value_parser(crate::read::<Mode>)
            .help(format!(
                "Read ahead of sequential readers: on, off, or auto, where it pays [default: {}]",
                Self::DEFAULT
            ));
        let number = |setting: Setting| {
            let default = prefetch::show(setting, Settings::default().get(setting));
            number(setting, setting.name()).help(format!("{} [default: {default}]", help(setting)))
        };
        let all = [mode].into_iter().chain(Setting::ALL.map(number));
        command.args(all.map(|argument| {
            let argument = argument.help_heading(HEADING);
            if SERVE { argument.conflicts_with("config") } else { argument }
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const SERVE: bool> FromArgMatches for LongArgs<SERVE> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self { mode: matches.get_one(prefetch::MODE).copied(), given: given(matches, Setting::name) })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

const HEADING: &str = "Reading ahead";

/// The option of a setting, under this name.
pub fn number(setting: Setting, name: &'static str) -> Arg {
    let (value, parser) = if prefetch::is_size(setting) {
        ("SIZE", crate::size as fn(&str) -> _)
    } else {
        ("N", crate::count as _)
    };
    Arg::new(name).long(name).value_name(value).value_parser(parser)
}

/// What a setting is, with its range.
pub fn help(setting: Setting) -> String {
    let what = match setting {
        Setting::Memory => "Memory for what is read ahead",
        Setting::LargestRequest => "Larger reads are neither answered from memory nor read ahead of",
        Setting::WindowMin => "What is read ahead of a stream at first",
        Setting::WindowMax => "Most that is read ahead of a stream, where memory allows",
        Setting::Streams => "Most streams that are read ahead of at a time",
    };
    let (least, most) = prefetch::range(setting);
    format!("{what}, from {least} to {most}")
}

/// The settings that were given, each under this name.
pub fn given(matches: &ArgMatches, name: fn(Setting) -> &'static str) -> Vec<(Setting, u64)> {
    let given = |setting: Setting| Some((setting, *matches.get_one(name(setting))?));
    Setting::ALL.into_iter().filter_map(given).collect()
}
