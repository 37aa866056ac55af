//! Throttle settings of a disk or a group: limits, weight, reservation, watermark. Checks one disk
//! or group at a time; the policy decides if reservations fit.

use block::layer::throttle::{DiskSettings, GroupSettings};
use policy::{
    throttle::{LimitKind, Limits, MAX_VALUE, Part, Setting, Share},
    watermark::Watermark,
};

use crate::{
    key::{Change, Field, Given, Key, Literal, Transfer, ValueKind, table},
    place::Mistakes,
    placed::Placed,
};

pub(crate) const DEFAULT_WEIGHT: u32 = 100;
pub(crate) const MAX_WATERMARK: u8 = 100;

/// Throttle settings of one disk or group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Valid limits, possibly none.
    pub limits: Limits,
    /// Weight among the members of its group, from 1 to 10000.
    pub weight: u32,
    /// Reservation in operations per second; 0 is none.
    pub iops_reservation: u64,
    /// Reservation in bytes per second; 0 is none.
    pub bps_reservation: u64,
    /// Utilization of the device in percent below which limits are lifted, 0 (never) to 100.
    pub watermark: u8,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            weight: DEFAULT_WEIGHT,
            iops_reservation: 0,
            bps_reservation: 0,
            watermark: 0,
        }
    }
}

impl Settings {
    /// Converts to the settings of a running disk.
    pub fn of_disk(&self) -> DiskSettings {
        DiskSettings { limits: self.limits, share: self.share(), watermark: self.watermark() }
    }

    /// Converts to the settings of a running group.
    pub fn of_group(&self) -> GroupSettings {
        GroupSettings { limits: self.limits, share: self.share(), watermark: self.watermark() }
    }

    /// Converts from the settings of a running disk or group.
    pub fn running(settings: &GroupSettings) -> Self {
        let GroupSettings { limits, share, watermark } = *settings;
        Self {
            limits,
            weight: share.weight(),
            iops_reservation: share.iops_reservation(),
            bps_reservation: share.bps_reservation(),
            watermark: watermark.percent(),
        }
    }

    pub(crate) fn share(&self) -> Share {
        // The range was checked when the key was read.
        let share = Share::new(self.weight).expect("checked");
        share.with_reservation(self.iops_reservation, self.bps_reservation)
    }

    fn watermark(&self) -> Watermark {
        Watermark::new(self.watermark).expect("checked")
    }
}

/// Rows of the nineteen limits, for a config with these settings.
pub(crate) fn limit_keys<T: 'static>(
    settings: fn(&T) -> &Settings,
    settings_mut: fn(&mut T) -> &mut Settings,
) -> impl Iterator<Item = Key<T>> {
    let field = move |setting: Setting| {
        let read = move |config: &mut T, given: Given<'_>| {
            // Checks the range of this setting; combinations are checked by `judge`.
            let set = settings_mut(config).limits.set(setting, given.number);
            set.map_err(|invalid| invalid.rule.to_string())
        };
        Field::new(read, move |config| Some(Literal::Number(settings(config).limits.get(setting))))
    };
    Setting::ALL.into_iter().map(move |setting| Key {
        name: setting.name(),
        heading: "Limits",
        value: match setting {
            // Whole seconds, as in QEMU.
            Setting::Limit(_, Part::BurstLength) => ValueKind::Seconds,
            _ if setting.is_size() => ValueKind::Size,
            _ => ValueKind::Count,
        },
        placeholder: placeholder(setting),
        default: "",
        help: help(setting),
        change: Change::Live,
        transfer: Transfer::Moves,
        field: field(setting),
    })
}

/// Help of a setting.
pub(crate) fn help(setting: Setting) -> String {
    let Setting::Limit(kind, part) = setting else {
        return "Bytes after which one request counts as more than one operation; 0 is never".to_owned();
    };
    let unit = if kind.counts_bytes() { "Bytes" } else { "Operations" };
    let which = match kind {
        LimitKind::BpsTotal | LimitKind::IopsTotal => "of reads and writes together",
        LimitKind::BpsRead | LimitKind::IopsRead => "of reads",
        LimitKind::BpsWrite | LimitKind::IopsWrite => "of writes and discards",
    };
    match part {
        Part::Rate => format!("{unit} per second {which}; 0 is no limit"),
        Part::BurstRate => format!("{unit} per second {which} during a burst; 0 is no burst"),
        Part::BurstLength => {
            let rate = Setting::Limit(kind, Part::Rate).name();
            format!(
                "Seconds L of that rate M that may be saved up while idle; a full burst over the limit R, --{rate}, \
                 lasts L × M ÷ (M − R) seconds, because R passes in any case [default: 1]"
            )
        }
    }
}

/// Placeholder of the value in the help.
pub(crate) fn placeholder(setting: Setting) -> &'static str {
    match setting {
        Setting::Limit(_, Part::BurstLength) => "SECONDS",
        _ if setting.is_size() => "SIZE",
        _ => "N",
    }
}

/// Rows of weight, reservations and watermark, for a config with these settings.
pub(crate) fn share_keys<T: 'static>(
    settings: fn(&T) -> &Settings,
    settings_mut: fn(&mut T) -> &mut Settings,
) -> Vec<Key<T>> {
    let number = |read: fn(&mut Settings, u64) -> Result<(), String>, write: fn(&Settings) -> u64| {
        Field::new(
            move |config: &mut T, given| read(settings_mut(config), given.number),
            move |config| Some(Literal::Number(write(settings(config)))),
        )
    };
    let weight = number(|to, value| weight(value).map(|value| to.weight = value), |of| of.weight.into());
    let iops = number(
        |to, value| reservation(value).map(|value| to.iops_reservation = value),
        |of| of.iops_reservation,
    );
    let bps = number(
        |to, value| reservation(value).map(|value| to.bps_reservation = value),
        |of| of.bps_reservation,
    );
    let watermark =
        number(|to, value| watermark(value).map(|value| to.watermark = value), |of| of.watermark.into());
    table! {
        "Shares" {
            "weight", ValueKind::Count, "N", weight, "100", Live, Moves,
                "Each disk's share of what its group has, beside that of the others there, from 1 to 10000";
            "iops-reservation", ValueKind::Count, "N", iops, "", Live, Moves,
                "Operations per second that are promised, whatever others ask for; 0 is none";
            "bps-reservation", ValueKind::Size, "SIZE", bps, "", Live, Moves,
                "Bytes per second that are promised; where both are, the promise ends with what is used up first";
            "watermark", ValueKind::Count, "PERCENT", watermark, "0", Live, Moves,
                "Percent of what the device can do below which limits are lifted; 0 never lifts them";
        }
    }
}

/// Reports limits that break a rule together.
pub(crate) fn judge<T>(placed: &Placed<T>, settings: &Settings, mistakes: &Mistakes) {
    if let Err(invalid) = settings.limits.validate() {
        mistakes.tell(placed.wrong(invalid.setting.name(), invalid.rule.to_string()));
    }
}

fn weight(value: u64) -> Result<u32, String> {
    let weight = u32::try_from(value).ok().filter(|weight| Share::WEIGHTS.contains(weight));
    weight.ok_or_else(|| {
        let (least, most) = (Share::WEIGHTS.start(), Share::WEIGHTS.end());
        format!("is out of range; a weight is from {least} to {most}")
    })
}

fn reservation(value: u64) -> Result<u64, String> {
    match value {
        0..=MAX_VALUE => Ok(value),
        _ => Err(format!("is too large; it may be {MAX_VALUE} at most")),
    }
}

fn watermark(value: u64) -> Result<u8, String> {
    let percent = u8::try_from(value).ok().filter(|&percent| percent <= MAX_WATERMARK);
    percent.ok_or_else(|| format!("is out of range; a watermark is from 0 to {MAX_WATERMARK} percent"))
}
