//! The twenty limit settings as options, derived from the policy's table so that names cannot
//! differ.

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use policy::throttle::{LimitKind, LimitPart, LimitSetting};

use crate::throttle;

/// Given limits, in the order of the table.
#[derive(Clone, Debug, Default)]
pub struct ThrottleLimitArgs {
    given: Vec<(LimitSetting, u64)>,
}

impl ThrottleLimitArgs {
    /// Given limits with their values.
    pub fn given(&self) -> &[(LimitSetting, u64)] {
        &self.given
    }
}

/// Description of the twenty options in a command's help, which does not list them. Fits 80
/// columns.
pub const LIMITS_HELP: &str = "\
Limits:
  --{iops,bps}-{total,read,write} R             per second; 0 is no limit
  --{iops,bps}-{total,read,write}-max M         during a burst; 0 is no burst
  --{iops,bps}-{total,read,write}-max-length L  burst length in seconds
  --{iops,bps}-{total,read,write}-per-gib R     of a disk, for each GiB of its size,
                                                with -per-gib-min, -per-gib-max
  --burst-for TIME                              duration of a full burst: 30s
  --iops-size SIZE                              a larger request counts as more
A total excludes a read or write limit of the same kind. The burst capacity is \
L × M. A full burst lasts L × M ÷ (M − R) seconds, because the bucket drains at \
R. L is 1 by default: the whole capacity is then admitted at once. \
--burst-for replaces L: a full burst of each M lasts that long.";

/// Option of a setting. [`LIMITS_HELP`] describes it in the help.
pub fn option(setting: LimitSetting) -> Arg {
    let parser = crate::limit_parser(setting);
    Arg::new(setting.name())
        .long(setting.name())
        .value_name(throttle::placeholder(setting))
        .value_parser(parser)
        .help(throttle::help(setting))
        .aliases(short_name(setting))
        // Twenty similar options would dominate the help.
        .hide(true)
}

/// Short alias of the most common limits. Without it clap would suggest `--iops-size` for `--iops`.
pub(super) fn short_name(setting: LimitSetting) -> Option<&'static str> {
    match setting {
        LimitSetting::Limit(LimitKind::IopsTotal, LimitPart::Rate) => Some("iops"),
        LimitSetting::Limit(LimitKind::BpsTotal, LimitPart::Rate) => Some("bps"),
        _ => None,
    }
}

impl Args for ThrottleLimitArgs {
    fn augment_args(command: Command) -> Command {
        command.args(LimitSetting::ALL.map(option))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ThrottleLimitArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |setting: LimitSetting| Some((setting, *matches.get_one(setting.name())?));
        Ok(Self { given: LimitSetting::ALL.into_iter().filter_map(given).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_all_requests_have_short_names() {
        let command = ThrottleLimitArgs::augment_args(Command::new("weir"));
        let matches = command.try_get_matches_from(["weir", "--iops", "5", "--bps=1M"]).expect("options");
        let mut given = ThrottleLimitArgs::from_arg_matches(&matches).expect("limits").given;
        given.sort_by_key(|(_, value)| *value);
        let names: Vec<_> = given.iter().map(|(setting, value)| (setting.name(), *value)).collect();
        assert_eq!(names, [("iops-total", 5), ("bps-total", 1 << 20)]);
    }
}
