//! The options of `weir prefetch`, from the policy's table of settings, without the prefix
//! `prefetch-`.

use clap::{ArgMatches, Args, Command, FromArgMatches};
use policy::prefetch::{PrefetchMode, PrefetchSetting};
use settings::{
    arguments::prefetch::{given, number},
    prefetch::{self, help},
};

use crate::{
    client::{
        ControlAddress,
        change::{SettingName, SettingValue, SettingsChange},
    },
    settings_command::SaveArgs,
};

pub(crate) const EXAMPLES: &str = concat!(
    "\
Examples:
  weir prefetch vm1
      Settings and counters of the disk vm1.
  weir prefetch vm1 off
      Stops prefetching at once. Settings that are not given stay.
  weir prefetch vm1 on --memory 64M --window-max 8M
      All sequential streams, with a larger window and more memory.
  weir prefetch vm1 auto --save
      Pauses while too little of the prefetched data is used; saved in the config file.

All settings of one command change together, or none does. ", settings::sizes!(), "
The hit rate is the share of reads served from memory, completely or in part. The accuracy is the share of prefetched data that was \
used, of the data that was used or discarded. Both count from the opening of the disk."
);

/// Arguments of `weir prefetch`.
#[derive(Debug, Args)]
pub(crate) struct PrefetchArgs {
    /// Name of the disk
    #[arg(value_name = "DISK")]
    pub(crate) name: String,
    /// on: for all sequential streams; auto: pauses while too little of the prefetched data is
    /// used; off: never
    #[arg(value_name = "MODE", value_parser = settings::parse::<PrefetchMode>)]
    mode: Option<PrefetchMode>,
    /// Print results as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: Option<ControlAddress>,
    #[command(flatten)]
    numbers: PrefetchNumberArgs,
    #[command(flatten)]
    pub(crate) save: SaveArgs,
}

impl PrefetchArgs {
    pub(crate) fn change(&self) -> SettingsChange {
        let mut change = SettingsChange::default();
        if let Some(mode) = self.mode {
            change.set(SettingName::Prefetch, SettingValue::Text(mode.to_string()));
        }
        for &(setting, value) in &self.numbers.given {
            change.set(SettingName::PrefetchNumber(setting), SettingValue::Number(value));
        }
        change
    }
}

#[derive(Clone, Debug, Default)]
struct PrefetchNumberArgs {
    given: Vec<(PrefetchSetting, u64)>,
}

impl Args for PrefetchNumberArgs {
    fn augment_args(command: Command) -> Command {
        let number = |setting| {
            number(setting, prefetch::short_name(setting)).help(help(setting)).help_heading("Settings")
        };
        // The command is about prefetching only, so its options need no prefix.
        command.args(PrefetchSetting::ALL.map(number))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for PrefetchNumberArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self { given: given(matches, prefetch::short_name) })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use serde_json::{Value, json};

    use crate::cli::{Cli, WeirCommand};

    fn change(line: &str) -> Result<Value, String> {
        let tokens = ["weir", "prefetch", "vm1"].into_iter().chain(line.split_whitespace());
        let Cli { command } = Cli::try_parse_from(tokens).map_err(|error| error.render().to_string())?;
        let WeirCommand::Prefetch(arguments) = command else { panic!("another command") };
        Ok(Value::Object(arguments.change().arguments()))
    }

    #[test]
    fn only_given_options_change() {
        assert_eq!(change(""), Ok(json!({})));
        assert_eq!(change("off"), Ok(json!({ "prefetch": "off" })));
        let all = "on --memory 64M --largest-request 1M --window-min 4096 --window-max 8M --streams 7";
        let expect = json!({
            "prefetch": "on", "prefetch-memory": 64 << 20, "prefetch-largest-request": 1 << 20,
            "prefetch-window-min": 4096, "prefetch-window-max": 8 << 20, "prefetch-streams": 7
        });
        assert_eq!(change(all), Ok(expect));
    }

    #[test]
    fn malformed_values_are_rejected() {
        assert!(change("maybe").unwrap_err().contains("is not one of on, off and auto"));
        assert!(change("--streams 1K").unwrap_err().contains("is not a plain number"));
        assert!(change("--memory much").unwrap_err().contains("is not a size"));
        assert!(change("--config f").unwrap_err().contains("required"), "--config is for --save");
    }
}
