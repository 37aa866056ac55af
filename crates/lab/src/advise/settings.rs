//! Applies the advice: commands for a running daemon, and a config file.
//!
//! The commands are complete and can be pasted into a shell. The file passes `weir check-config`:
//! it is the operator's file with changed settings and every other byte kept; or, without one, a
//! file of disks with placeholder images.

use std::fmt::Write as _;

use anyhow::{Context as _, anyhow};
use block::layer::throttle::DiskSettings;
use policy::{
    latency_target::{LatencySettings, PercentileTarget},
    throttle::{LimitPart, LimitSetting, Limits, NodeShare},
};
use settings::{LatencyConfig, LatencySetting, exact_size};
use toml_edit::{DocumentMut, Item, Table, TableLike, Value, value};

/// Changes of one disk or group.
#[derive(Clone, Debug, Default)]
pub(super) struct AdvisedChange {
    pub(super) is_group: bool,
    pub(super) name: String,
    pub(super) limits: Limits,
    /// Its share in the group that it joins.
    pub(super) share: NodeShare,
    /// True to print every weight, because a running daemon may have changed them.
    pub(super) is_weighed: bool,
    /// Settings in the file; those not in the advice are removed.
    pub(super) before: DiskSettings,
    /// The group that it joins.
    pub(super) group: Option<String>,
    /// The latency target, if one is advised; else it stays as it is.
    pub(super) latency_target: Option<PercentileTarget>,
    /// Size of a disk's placeholder image.
    pub(super) size_bytes: u64,
    /// True for a group that has to be created first.
    pub(super) is_new: bool,
}

impl AdvisedChange {
    /// Options that differ from their defaults, with their values; true for sizes.
    fn options(&self) -> Vec<(&'static str, u64, bool)> {
        let Self { limits, share, before: DiskSettings { share: current_share, .. }, .. } = self;
        let limits = LimitSetting::ALL.iter().filter(|setting| is_set(limits, **setting));
        let mut options: Vec<_> =
            limits.map(|setting| (setting.name(), self.limits.get(*setting), setting.is_size())).collect();
        // Shares have an effect within a group only.
        if self.group.is_none() {
            return options;
        }
        if self.is_weighed || share.weight() != current_share.weight() {
            options.push(("weight", share.weight().into(), false));
        }
        for (name, value, before, is_size) in [
            ("iops-reservation", share.iops_reservation(), current_share.iops_reservation(), false),
            ("bps-reservation", share.bps_reservation(), current_share.bps_reservation(), true),
        ] {
            if value > 0 || before > 0 {
                options.push((name, value, is_size));
            }
        }
        options
    }

    /// Keys of the advised latency target, with their values.
    fn latency_options(&self) -> Vec<(&'static str, String)> {
        let Some(target) = self.latency_target else { return Vec::new() };
        let advised = LatencySettings { target: Some(target), ..self.before.latency };
        let [advised, before] =
            [advised, self.before.latency].map(|settings| LatencyConfig::from_running(&settings));
        let keys = [LatencySetting::Target, LatencySetting::Percentile, LatencySetting::Directions];
        let changed = keys
            .into_iter()
            .filter(|key| *key == LatencySetting::Target || advised.text(*key) != before.text(*key));
        changed.map(|key| (key.name(), advised.text(key))).collect()
    }

    /// One line for a shell.
    pub(super) fn command(&self) -> String {
        let mut line = if self.is_new { "weir group add" } else { "weir throttle" }.to_owned();
        // A name that begins with a dash would parse as an option, so it follows `--`.
        let is_option = self.name.starts_with('-');
        if !is_option {
            let _ = write!(line, " {}", quoted(&self.name));
        }
        for (name, number, is_size) in self.options() {
            let _ = write!(line, " --{name} {}", shown(number, is_size));
        }
        for (name, text) in self.latency_options() {
            let _ = write!(line, " --{name} {text}");
        }
        // Settings of the old file that the advice drops must be reset explicitly in a running
        // daemon.
        let ends = |setting: &&LimitSetting| {
            is_set(&self.before.limits, **setting) && !is_set(&self.limits, **setting)
        };
        for setting in LimitSetting::ALL.iter().filter(ends) {
            let _ = write!(line, " --{} {}", setting.name(), self.limits.get(*setting));
        }
        if let Some(group) = &self.group {
            let _ = write!(line, " --group {}", quoted(group));
        }
        if is_option {
            let _ = write!(line, " -- {}", quoted(&self.name));
        }
        line
    }
}

/// True if a setting differs from its default.
pub(super) fn is_set(limits: &Limits, setting: LimitSetting) -> bool {
    let unset = u64::from(matches!(setting, LimitSetting::Limit(_, LimitPart::BurstLength)));
    limits.get(setting) > unset
}

fn shown(number: u64, is_size: bool) -> String {
    if is_size { exact_size(number) } else { number.to_string() }
}

/// Quotes a word for a POSIX shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.,:/@%+=".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Text of a config file with these changes: of `before`, or of a new one.
pub(super) fn config(before: Option<&str>, changes: &[AdvisedChange]) -> anyhow::Result<String> {
    let mut document: DocumentMut = before.unwrap_or_default().parse().context("the config is no TOML")?;
    for change in changes {
        let kind = if change.is_group { "group" } else { "disk" };
        // Implicit: `[disk.vm1]` needs no separate `[disk]` header.
        let of_kind = document.entry(kind).or_insert_with(|| {
            let mut table = Table::new();
            table.set_implicit(true);
            Item::Table(table)
        });
        let of_kind = of_kind.as_table_like_mut().with_context(|| format!("{kind} is no table"))?;
        if of_kind.get(&change.name).is_none() {
            let mut table = Table::new();
            if !change.is_group {
                // Clamped to the largest valid size, with an alignment that suits any format.
                let size = change.size_bytes.clamp(1 << 20, (1 << 63) - (1 << 20)).next_multiple_of(1 << 20);
                table.insert("image", value(format!("null:{}", exact_size(size))));
                // Only in a new file; an operator's file gets no comments inserted.
                if before.is_none()
                    && let Some(mut key) = table.key_mut("image")
                {
                    key.leaf_decor_mut().set_prefix("# Its image goes here.\n");
                }
            }
            of_kind.insert(&change.name, Item::Table(table));
        }
        let table = of_kind.get_mut(&change.name).and_then(Item::as_table_like_mut);
        let table = table.ok_or_else(|| anyhow!("[{kind}.{}] is no table", change.name))?;
        // Old limits that are not in the advice are removed.
        for setting in LimitSetting::ALL {
            if change.limits.get(setting) == 0
                || matches!(setting, LimitSetting::Limit(_, LimitPart::BurstLength))
            {
                table.remove(setting.name());
            }
        }
        for (name, number, is_size) in change.options() {
            // TOML integers have 64 bits with sign; larger numbers and sizes are strings.
            let new = match i64::try_from(number) {
                Ok(number) if !is_size => Value::from(number),
                _ => Value::from(shown(number, is_size)),
            };
            set(table, name, new);
        }
        for (name, text) in change.latency_options() {
            set(table, name, text.into());
        }
        if let Some(group) = &change.group {
            set(table, "group", group.as_str().into());
        }
    }
    Ok(document.to_string())
}

/// Sets a value; keeps the comments and blanks around an existing one.
fn set(table: &mut dyn TableLike, name: &str, mut new: Value) {
    if let Some(old) = table.get_mut(name).and_then(Item::as_value_mut) {
        // The decor holds the whitespace and trailing comment of the value.
        *new.decor_mut() = old.decor().clone();
        *old = new;
    } else {
        table.insert(name, Item::Value(new));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use policy::throttle::{LimitKind, RateLimit};

    use super::*;

    fn change(name: &str, kind: LimitKind, limit: RateLimit) -> AdvisedChange {
        let mut change =
            AdvisedChange { name: name.to_owned(), size_bytes: 5 << 20, ..AdvisedChange::default() };
        *change.limits.limit_mut(kind) = limit;
        change
    }

    const BURST: RateLimit = RateLimit { rate: 100, burst_rate: 400, burst_length_s: 3, ..RateLimit::NONE };

    #[test]
    fn commands_are_quoted_for_a_shell() {
        let line = |name: &str| change(name, LimitKind::IopsTotal, BURST).command();
        let options = "--iops-total 100 --iops-total-max 400 --iops-total-max-length 3";
        assert_eq!(line("vm1"), format!("weir throttle vm1 {options}"));
        assert_eq!(line("it's $a"), format!(r"weir throttle 'it'\''s $a' {options}"));
        assert_eq!(line("-f"), format!("weir throttle {options} -- -f"));
        let bytes = change("vm1", LimitKind::BpsTotal, RateLimit { rate: 3 << 20, ..RateLimit::NONE });
        assert_eq!(bytes.command(), "weir throttle vm1 --bps-total 3M");
        let group =
            AdvisedChange { is_new: true, is_group: true, ..change("shared", LimitKind::IopsTotal, BURST) };
        assert_eq!(group.command(), format!("weir group add shared {options}"));
        let member = AdvisedChange {
            group: Some("shared".into()),
            share: NodeShare::default().with_reservation(7, 0),
            ..AdvisedChange::default()
        };
        let weighed = AdvisedChange {
            name: "vm2".into(),
            share: NodeShare::new(500).unwrap(),
            is_weighed: true,
            ..member.clone()
        };
        assert_eq!(weighed.command(), "weir throttle vm2 --weight 500 --group shared");
        let mut configured =
            DiskSettings { share: NodeShare::new(50).unwrap().with_reservation(0, 9), ..weighed.before };
        *configured.limits.limit_mut(LimitKind::IopsRead) = BURST;
        let reset =
            AdvisedChange { share: NodeShare::default(), is_weighed: false, before: configured, ..weighed };
        assert_eq!(
            reset.command(),
            "weir throttle vm2 --weight 100 --bps-reservation 0 --iops-read 0 --iops-read-max 0 \
             --iops-read-max-length 1 --group shared"
        );
        let member = AdvisedChange { name: "vm1".into(), ..member };
        assert_eq!(member.command(), "weir throttle vm1 --iops-reservation 7 --group shared");
    }

    #[test]
    fn advised_file_passes_check_config() {
        let names = ["vm1", "8,0", "a \"b\" c", "/dev/sda"];
        let changes = names.map(|name| change(name, LimitKind::IopsTotal, BURST));
        let text = config(None, &changes).unwrap();
        let parsed = settings::config::parse("new.toml", &text, Path::new("")).unwrap();
        let plan = settings::DesiredState::new(parsed, 0).unwrap();
        for (disk, name) in plan.disks.iter().zip(names) {
            assert_eq!((disk.name.as_str(), disk.settings.limits.limit(LimitKind::IopsTotal)), (name, BURST));
        }
        assert!(text.starts_with("[disk.vm1]\n# Its image goes here.\nimage = \"null:5M\"\n"), "{text}");
    }

    #[test]
    fn other_keys_of_the_config_file_are_preserved() {
        let before = "# Ours.\n\
                      [disk.vm1]\n\
                      image = \"null:1M\"   # small\n\
                      iops-total = 5 # once\n\
                      bps-total = \"1M\"\n\
                      iops-total-max = 50\n\
                      iops-total-max-length = 9\n\
                      [group.gold]\n\
                      weight = 7\n";
        let mut gold = change("gold", LimitKind::BpsTotal, RateLimit { rate: 1 << 20, ..RateLimit::NONE });
        gold.is_group = true;
        gold.before.share = NodeShare::new(7).unwrap();
        let changes = [change("vm1", LimitKind::IopsTotal, RateLimit { burst_length_s: 1, ..BURST }), gold];
        let after = config(Some(before), &changes).unwrap();
        let expected = "# Ours.\n[disk.vm1]\nimage = \"null:1M\"   # small\niops-total = 100 # once\n\
                        iops-total-max = 400\n[group.gold]\nweight = 7\nbps-total = \"1M\"\n";
        assert_eq!(after, expected);
    }
}
