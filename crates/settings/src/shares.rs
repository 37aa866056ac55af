//! What a disk or a group may be held to and entitled to: limits, weight, reservation, watermark.
//! Judged here one disk or group at a time; whether promises fit is the policy's to say.

use block::layer::throttle::{DiskSettings, GroupSettings};
use policy::{
    throttle::{Limits, MAX_VALUE, Setting, Share},
    watermark::Watermark,
};

use super::{Mistakes, Place, Said, Wrong};

pub(crate) const DEFAULT_WEIGHT: u32 = 100;
pub(crate) const MAX_WATERMARK: u8 = 100;

/// What holds for one disk or group by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Valid, perhaps none.
    pub limits: Limits,
    /// Its share among those of the same group, from 1 to 10000.
    pub weight: u32,
    /// Operations per second that it is promised; 0 is none.
    pub iops_reservation: u64,
    /// Bytes per second that it is promised; 0 is none.
    pub bps_reservation: u64,
    /// Percent of the device's capacity in use below which limits are lifted, 0 (never) to 100.
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
    /// As a disk takes them.
    pub fn of_disk(&self) -> DiskSettings {
        DiskSettings { limits: self.limits, share: self.share(), watermark: self.watermark() }
    }

    /// As a group takes them.
    pub fn of_group(&self) -> GroupSettings {
        GroupSettings { limits: self.limits, share: self.share(), watermark: self.watermark() }
    }

    pub(crate) fn share(&self) -> Share {
        let share = Share::new(self.weight).expect("checked");
        share.with_reservation(self.iops_reservation, self.bps_reservation)
    }

    fn watermark(&self) -> Watermark {
        Watermark::new(self.watermark).expect("checked")
    }
}

/// Limits as they were set, one by one.
pub type LimitsDraft = Vec<Said<(Setting, u64)>>;

/// [`Settings`] as they were said, each with its place.
#[derive(Clone, Debug, Default)]
pub struct SettingsDraft {
    pub limits: LimitsDraft,
    pub weight: Option<Said<u64>>,
    pub iops_reservation: Option<Said<u64>>,
    pub bps_reservation: Option<Said<u64>>,
    pub watermark: Option<Said<u64>>,
}

impl SettingsDraft {
    /// What they add up to.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self) -> Result<Settings, Wrong> {
        let mistakes = Mistakes::default();
        let settings = self.judge(&mistakes);
        mistakes.first_unless(settings)
    }

    /// The same, where every rule that is broken is told.
    pub(crate) fn judge(&self, mistakes: &Mistakes) -> Settings {
        let before = mistakes.count();
        let settings = self.judge_values(mistakes);
        // What one limit is to another is known once each is one.
        if mistakes.count() == before
            && let Err(invalid) = settings.limits.validate()
        {
            let said = self.limits.iter().rfind(|said| said.value.0 == invalid.setting);
            let place = said.map_or_else(|| Place::new(invalid.setting.name()), |said| said.place.clone());
            mistakes.tell(place.wrong(invalid.rule.to_string()));
        }
        settings
    }

    /// What the values are that can be by themselves; others are told.
    pub(crate) fn judge_values(&self, mistakes: &Mistakes) -> Settings {
        let standard = Settings::default();
        let mut limits = Limits::default();
        for Said { value: (setting, value), place } in &self.limits {
            let set = limits.set(*setting, *value);
            mistakes.keep(set.map_err(|invalid| place.wrong(invalid.rule.to_string())));
        }
        let reservation = |said: &Said<u64>| mistakes.keep(reservation(said));
        let weight = self.weight.as_ref().and_then(|said| mistakes.keep(weight(said)));
        let watermark = self.watermark.as_ref().and_then(|said| mistakes.keep(watermark(said)));
        Settings {
            limits,
            weight: weight.unwrap_or(standard.weight),
            iops_reservation: self.iops_reservation.as_ref().and_then(reservation).unwrap_or_default(),
            bps_reservation: self.bps_reservation.as_ref().and_then(reservation).unwrap_or_default(),
            watermark: watermark.unwrap_or_default(),
        }
    }
}

fn weight(said: &Said<u64>) -> Result<u32, Wrong> {
    let weight = u32::try_from(said.value).ok().filter(|weight| Share::WEIGHTS.contains(weight));
    weight.ok_or_else(|| {
        let (least, most) = (Share::WEIGHTS.start(), Share::WEIGHTS.end());
        said.wrong(format!("is out of range; a weight is from {least} to {most}"))
    })
}

fn reservation(said: &Said<u64>) -> Result<u64, Wrong> {
    if said.value > MAX_VALUE {
        return Err(said.wrong(format!("is too large; it may be {MAX_VALUE} at most")));
    }
    Ok(said.value)
}

fn watermark(said: &Said<u64>) -> Result<u8, Wrong> {
    let percent = u8::try_from(said.value).ok().filter(|&percent| percent <= MAX_WATERMARK);
    percent.ok_or_else(|| {
        said.wrong(format!("is out of range; a watermark is from 0 to {MAX_WATERMARK} percent"))
    })
}
