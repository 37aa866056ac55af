//! Quotas by volume of a disk or a group as text: `2T per month`, and the limit after that.
//!
//! All interfaces read and write the values in this form, so that each rule is stated once. Never
//! knows the bytes that were counted: `policy::volume_quota` decides, and the daemon counts.

use policy::{
    throttle::MAX_VALUE,
    volume_quota::{MAX_BYTES, QuotaPeriod, VolumeAmount, VolumeQuota},
};

/// Heading of the rows.
pub const HEADING: &str = "Quota";

/// One of the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaSetting {
    /// Bytes of reads and writes in a period.
    Total,
    /// Bytes of writes in a period.
    Writes,
    /// Limit while a quota is used up.
    Rate,
}

impl QuotaSetting {
    /// All settings, in the order of the help.
    pub const ALL: [Self; 3] = [Self::Total, Self::Writes, Self::Rate];

    /// Name of the key.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Total => "quota",
            Self::Writes => "write-quota",
            Self::Rate => "quota-rate",
        }
    }

    /// The setting with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|setting| setting.name() == name)
    }

    /// Sets a value from its text.
    ///
    /// # Errors
    /// Returns the rule that the text breaks.
    pub fn read(self, quota: &mut VolumeQuota, text: &str) -> Result<(), String> {
        match self {
            Self::Total => quota.total = amount(text)?,
            Self::Writes => quota.writes = amount(text)?,
            Self::Rate => quota.rate_bps = rate(crate::size(text)?)?,
        }
        Ok(())
    }

    /// Text that [`QuotaSetting::read`] reads as the present value.
    pub fn text(self, quota: &VolumeQuota) -> String {
        match self {
            Self::Total => amount_text(quota.total),
            Self::Writes => amount_text(quota.writes),
            Self::Rate => crate::exact_size(quota.rate_bps),
        }
    }
}

/// Applies changes in order. Removing the last quota removes its rate, unless the changes set it.
///
/// # Errors
/// Returns the setting that breaks a rule, with the rule.
pub fn with_settings(
    mut quota: VolumeQuota,
    changes: &[(QuotaSetting, String)],
) -> Result<VolumeQuota, (QuotaSetting, String)> {
    for (setting, text) in changes {
        setting.read(&mut quota, text).map_err(|rule| (*setting, rule))?;
    }
    let is_set = |setting| changes.iter().any(|(changed, _)| *changed == setting);
    if quota.is_none() && !is_set(QuotaSetting::Rate) {
        quota.rate_bps = 0;
    }
    check(&quota, 0)?;
    Ok(quota)
}

/// Checks the settings together, and with the reservation of the disk or group in bytes per second.
///
/// # Errors
/// Returns the setting that breaks a rule, with the rule.
pub fn check(quota: &VolumeQuota, bps_reservation: u64) -> Result<(), (QuotaSetting, String)> {
    let VolumeQuota { total, rate_bps, .. } = *quota;
    let (setting, rule) = match (quota.is_none(), rate_bps) {
        (true, 1..) => {
            let rule = "has no effect without a quota (set quota or write-quota too)".to_owned();
            (QuotaSetting::Rate, rule)
        }
        (false, 0) => {
            let setting = if total.is_some() { QuotaSetting::Total } else { QuotaSetting::Writes };
            let rule = "needs quota-rate, the limit while the quota is used up (set it, such as \"5M\")";
            (setting, rule.to_owned())
        }
        (false, _) if rate_bps < bps_reservation => {
            let rule = format!(
                "is below bps-reservation ({bps_reservation}), which holds at all times (raise it, or lower \
                 the reservation)"
            );
            (QuotaSetting::Rate, rule)
        }
        _ => return Ok(()),
    };
    Err((setting, rule))
}

pub(crate) fn rate(rate_bps: u64) -> Result<u64, String> {
    match rate_bps {
        0..=MAX_VALUE => Ok(rate_bps),
        _ => Err(format!("is too large; it may be {MAX_VALUE} at most")),
    }
}

fn amount(text: &str) -> Result<Option<VolumeAmount>, String> {
    // As other limits are removed.
    if text == "0" {
        return Ok(None);
    }
    let periods = || QuotaPeriod::ALL.map(QuotaPeriod::name).join(", ");
    let mut words = text.split_ascii_whitespace();
    let (Some(size), Some("per"), Some(period), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err("is no amount in a period (write it as in \"2T per month\"; 0 is none)".to_owned());
    };
    let period = QuotaPeriod::from_name(period).ok_or_else(|| {
        let near = crate::suggest::nearest(period, QuotaPeriod::ALL.map(QuotaPeriod::name));
        let hint = near.map(|near| format!("; did you mean {near:?}?")).unwrap_or_default();
        format!("has no period {period:?} (a period is one of {}{hint})", periods())
    })?;
    match crate::size(size)? {
        0 => Err("is an amount of 0 (write 0 alone for no quota)".to_owned()),
        bytes @ 1..=MAX_BYTES => Ok(Some(VolumeAmount { bytes, period })),
        _ => Err(format!("is too large; a quota may be {} at most", crate::exact_size(MAX_BYTES))),
    }
}

fn amount_text(amount: Option<VolumeAmount>) -> String {
    amount.map_or_else(
        || "0".to_owned(),
        |VolumeAmount { bytes, period }| format!("{} per {}", crate::exact_size(bytes), period.name()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(changes: &[(&str, &str)]) -> Result<VolumeQuota, String> {
        let named = |(name, text): &(&str, &str)| {
            (QuotaSetting::from_name(name).expect("a setting"), (*text).to_owned())
        };
        let changes: Vec<_> = changes.iter().map(named).collect();
        let rule = |(setting, rule): (QuotaSetting, String)| format!("{} {rule}", setting.name());
        with_settings(VolumeQuota::default(), &changes).map_err(rule)
    }

    #[test]
    fn values_are_written_as_they_are_read() {
        for text in ["2T per month", "500G per day", "1 per hour", "1000 per week", "1048576T per day", "0"] {
            let mut quota = VolumeQuota::default();
            QuotaSetting::Writes.read(&mut quota, text).expect("valid");
            assert_eq!(QuotaSetting::Writes.text(&quota), text);
            assert_eq!(quota.total, None);
        }
        let quota = changed(&[("quota", "  1024M   per week "), ("quota-rate", "5M")]).expect("valid");
        assert_eq!(QuotaSetting::ALL.map(|setting| setting.text(&quota)), ["1G per week", "0", "5M"]);
    }

    #[test]
    fn invalid_values_name_the_rule() {
        for (text, rule) in [
            ("2T", "quota is no amount in a period (write it as in \"2T per month\"; 0 is none)"),
            ("2T a month", "quota is no amount in a period"),
            ("2T per month now", "quota is no amount in a period"),
            ("", "quota is no amount in a period"),
            (
                "2T per mont",
                "quota has no period \"mont\" (a period is one of hour, day, week, month; did you mean \
                 \"month\"?)",
            ),
            (
                "2T per fortnight",
                "quota has no period \"fortnight\" (a period is one of hour, day, week, month)",
            ),
            ("2T per Month", "quota has no period \"Month\""),
            ("0 per day", "quota is an amount of 0 (write 0 alone for no quota)"),
            ("-1 per day", "quota is not a size"),
            ("two per day", "quota is not a size"),
            ("1025P per day", "quota is too large; a quota may be 1048576T at most"),
        ] {
            let broken = changed(&[("quota", text), ("quota-rate", "1M")]).expect_err(text);
            assert!(broken.starts_with(rule), "{text}: {broken}");
        }
        let broken = changed(&[("quota", "1G per day"), ("quota-rate", "1P")]).expect_err("too large");
        assert!(broken.starts_with("quota-rate is too large"), "{broken}");
    }

    #[test]
    fn mistakes_of_a_config_are_named_with_their_key() {
        let check = |text: &str| {
            let text = format!("[disk.d]\nimage = \"null:1M\"\n{text}");
            let parsed = crate::config::parse("", &text, std::path::Path::new(""));
            let plan = parsed.and_then(|parsed| crate::DesiredState::new(parsed, 0));
            plan.map(drop).map_err(|error| error.to_string())
        };
        for (text, rule) in [
            ("quota = \"2T\"\nquota-rate = 1", "disk.d.quota = \"2T\": is no amount in a period"),
            ("quota-rate = \"5M\"", "disk.d.quota-rate = \"5M\": has no effect without a quota"),
            ("write-quota = \"1G per day\"", "disk.d.write-quota = \"1G per day\": needs quota-rate"),
            ("quota = \"1G per day\"\nquota-rate = 0", "disk.d.quota = \"1G per day\": needs quota-rate"),
            (
                "quota = \"1G per day\"\nquota-rate = 9\nbps-reservation = 10",
                "disk.d.quota-rate = 9: is below bps-reservation (10)",
            ),
            (
                "time-zone = \"UTC\"",
                "disk.d.time-zone = \"UTC\": is not used, because there is no schedule and no quota",
            ),
            (
                "group = \"g\"\n[group.g]\ncluster = true\nquota = \"1G per day\"\nquota-rate = 1\n\
                 [cluster]\nname = \"c\"\netcd = [\"http://127.0.0.1:1\"]",
                "group.g.quota = \"1G per day\": counts the bytes of this host",
            ),
        ] {
            let error = check(text).expect_err(text);
            assert!(error.contains(rule), "{text}: {error}");
        }
        let zoned = "quota = \"1G per day\"\nquota-rate = \"5M\"\ntime-zone = \"UTC\"";
        assert_eq!(check(zoned), Ok(()), "a quota uses the time zone");
    }

    #[test]
    fn quota_and_rate_need_each_other() {
        let without_quota = "quota-rate has no effect without a quota (set quota or write-quota too)";
        assert_eq!(changed(&[("quota-rate", "5M")]), Err(without_quota.to_owned()));
        for name in ["quota", "write-quota"] {
            let expect = format!(
                "{name} needs quota-rate, the limit while the quota is used up (set it, such \
                                  as \"5M\")"
            );
            assert_eq!(changed(&[(name, "1G per day")]), Err(expect.clone()));
            assert_eq!(changed(&[(name, "1G per day"), ("quota-rate", "0")]), Err(expect));
        }
        let both = [("quota", "1G per day"), ("write-quota", "1G per hour"), ("quota-rate", "5")];
        let both = changed(&both).expect("valid");
        let removed = |name: &str| (QuotaSetting::from_name(name).expect("a setting"), "0".to_owned());
        let one = with_settings(both, &[removed("quota")]).expect("a quota is left");
        assert_eq!((one.total, one.rate_bps), (None, 5));
        assert_eq!(with_settings(one, &[removed("write-quota")]), Ok(VolumeQuota::default()));
        let (setting, rule) = check(&both, 6).expect_err("below the reservation");
        assert_eq!(setting, QuotaSetting::Rate);
        assert!(rule.starts_with("is below bps-reservation (6)"), "{rule}");
    }
}
