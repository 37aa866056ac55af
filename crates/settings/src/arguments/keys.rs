//! Command-line options, derived from the rows of a table of keys.

use std::{ffi::OsStr, fmt, marker::PhantomData, path::Path};

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, parser::ValueSource};

use super::limits;
use crate::{
    ConfigError, DiskConfig, GroupConfig, Origin,
    key::{ConfigKey, KeyType},
    origins::{ConfigWithOrigins, KeyTable},
};

/// Selection of the keys that are options of a command, and their adaptation to it.
pub trait OptionSelection: Clone + fmt::Debug + Send + Sync + 'static {
    /// Config that the keys belong to.
    type Config: KeyTable;

    /// True if the key is an option.
    fn is_option(key: &ConfigKey<Self::Config>) -> bool;

    /// Adapts the option to this command.
    fn adapt(option: Arg) -> Arg {
        option
    }
}

/// Key options of a command, as given.
#[derive(Clone, Debug)]
pub struct ConfigKeyArgs<O: OptionSelection> {
    given: Vec<(&'static str, String)>,
    options: PhantomData<O>,
}

impl<O: OptionSelection> Default for ConfigKeyArgs<O> {
    fn default() -> Self {
        Self { given: Vec::new(), options: PhantomData }
    }
}

impl<O: OptionSelection> ConfigKeyArgs<O> {
    /// Rows of the keys that are options, in order.
    pub fn keys() -> impl Iterator<Item = &'static ConfigKey<O::Config>> {
        O::Config::keys().iter().filter(|key| key.heading != crate::schedule::HEADING && O::is_option(key))
    }

    /// Names and values of the given options; a flag's value is `true`.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.given.iter().map(|(name, text)| (*name, text.as_str()))
    }

    /// Value of a given option.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.given().find(|(known, _)| *known == name).map(|(_, text)| text)
    }

    /// Reads given options into a config: those that it has keys for and that `is_included`
    /// selects. Paths are relative to `directory`.
    ///
    /// # Errors
    /// Fails on a malformed value.
    pub fn read_into<T: KeyTable>(
        &self,
        config: &mut ConfigWithOrigins<T>,
        directory: &Path,
        is_included: impl Fn(&str) -> bool,
    ) -> Result<(), ConfigError> {
        for (name, text) in self.given().filter(|(name, _)| is_included(name)) {
            let Some(key) = T::key(name) else { continue };
            let origin = match key.value {
                KeyType::Flag => Origin::new(format!("--{name}")),
                _ => Origin::option(name, text),
            };
            config.set(key, text, directory, origin)?;
        }
        Ok(())
    }

    fn options() -> impl Iterator<Item = Arg> {
        Self::keys().map(|key| O::adapt(option(key)))
    }
}

impl<O: OptionSelection<Config = DiskConfig>> ConfigKeyArgs<O> {
    /// Reads the given options that `is_included` selects into a disk. With `--group`, limits,
    /// reservations, watermark and latency settings apply to the group, which is returned.
    ///
    /// # Errors
    /// Fails on a malformed value.
    pub fn read_disk(
        &self,
        disk: &mut ConfigWithOrigins<DiskConfig>,
        is_included: impl Fn(&str) -> bool,
    ) -> Result<Option<ConfigWithOrigins<GroupConfig>>, ConfigError> {
        // Without a group all options apply to the disk itself.
        let Some(name) = self.value("group") else {
            self.read_into(disk, Path::new(""), is_included)?;
            return Ok(None);
        };
        let config = GroupConfig { name: name.to_owned(), ..GroupConfig::default() };
        let mut group = ConfigWithOrigins::new(config, Origin::option("group", name));
        // The weight is the disk's share within the group, so it stays with the disk.
        let is_of_group = |key: &str| GroupConfig::key(key).is_some() && !["group", "weight"].contains(&key);
        self.read_into(&mut group, Path::new(""), is_of_group)?;
        self.read_into(disk, Path::new(""), |key| is_included(key) && !is_of_group(key))?;
        Ok(Some(group))
    }
}

/// Option of a key.
fn option<T: KeyTable>(key: &'static ConfigKey<T>) -> Arg {
    let help = match key.default {
        "" | "required" => key.help.clone(),
        default => format!("{} [default: {default}]", key.help),
    };
    let option = Arg::new(key.name).long(key.name).help(help).help_heading(key.heading);
    if key.value == KeyType::Flag {
        return option.action(ArgAction::SetTrue);
    }
    let option = option
        .value_name(key.placeholder)
        // Only the form is checked here: the config file may replace the value, or other keys
        // decide its range.
        .value_parser(move |text: &str| key.check(text))
        .action(if key.is_list() { ArgAction::Append } else { ArgAction::Set });
    let setting = policy::throttle::LimitSetting::from_name(key.name);
    match key.name {
        // qemu-img's short options.
        "format" => option.short('f'),
        "options" => option.short('o'),
        _ => option.aliases(setting.and_then(limits::short_name)).hide(setting.is_some()),
    }
}

impl<O: OptionSelection> Args for ConfigKeyArgs<O> {
    fn augment_args(command: Command) -> Command {
        command.args(Self::options())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<O: OptionSelection> FromArgMatches for ConfigKeyArgs<O> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut given = Vec::new();
        for key in Self::keys() {
            // Defaults of flags are not given by the user.
            if matches.value_source(key.name) != Some(ValueSource::CommandLine) {
                continue;
            }
            // Always UTF-8: the option's parser rejects anything else.
            let texts = matches.get_raw(key.name).into_iter().flatten().filter_map(OsStr::to_str);
            given.extend(texts.map(|text| (key.name, text.to_owned())));
        }
        Ok(Self { given, options: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Adapts `--group` for a command whose disks all share the limits of the group.
#[must_use]
pub fn describe_shared_group(option: Arg) -> Arg {
    match option.get_id() == "group" {
        true => {
            option.help("Put the disks into one group, which shares the limits, reservations, watermark and latency target")
        }
        false => option,
    }
}
