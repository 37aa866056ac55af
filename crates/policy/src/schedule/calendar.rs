//! Times of the week, in a subset of systemd's notation for calendar events: `Mon..Fri
//! 22:00-06:00`.

use alloc::{borrow::ToOwned, string::String};
use core::{fmt, str::FromStr};

pub(super) const MINUTES_PER_DAY: u32 = 24 * 60;

const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
/// Length of the short names: `Mon`.
const SHORT: usize = 3;

/// Days of the week, and a range of times that begins on each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CalendarRange {
    /// Bit 0 is Monday.
    days: u8,
    from_minute: u32,
    /// At most the minutes of a day. Not above `from_minute` if the range ends on the next day.
    to_minute: u32,
}

impl Default for CalendarRange {
    /// All days, at all times.
    fn default() -> Self {
        Self { days: EVERY_DAY, from_minute: 0, to_minute: MINUTES_PER_DAY }
    }
}

const EVERY_DAY: u8 = 0x7f;

impl CalendarRange {
    /// True if the range contains this minute of a week that begins on Monday.
    pub(super) const fn contains(self, minute_of_week: u32) -> bool {
        let (day, minute) = (minute_of_week / MINUTES_PER_DAY, minute_of_week % MINUTES_PER_DAY);
        if self.from_minute < self.to_minute {
            return begins_on_day(self.days, day) && minute >= self.from_minute && minute < self.to_minute;
        }
        begins_on_day(self.days, day) && minute >= self.from_minute
            || begins_on_day(self.days, day + 6) && minute < self.to_minute
    }
}

const fn begins_on_day(days: u8, day: u32) -> bool {
    days & 1 << (day % 7) != 0
}

/// Rule that the text of a [`CalendarRange`] breaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CalendarError {
    /// Not a day of the week.
    Day(String),
    /// Not a range of times.
    Times(String),
    /// The range begins and ends at the same time.
    Empty,
}

impl fmt::Display for CalendarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Day(day) => write!(f, "has no day {day:?} (write days as in Mon..Fri or Sat,Sun)"),
            Self::Times(times) => {
                write!(f, "has no range of times in {times:?} (write it as in 22:00-06:00, up to 24:00)")
            }
            Self::Empty => f.write_str("begins and ends at the same time (write 00:00-24:00 for whole days)"),
        }
    }
}

impl core::error::Error for CalendarError {}

impl FromStr for CalendarRange {
    type Err = CalendarError;

    /// Parses `DAYS`, `HH:MM-HH:MM`, or both.
    fn from_str(text: &str) -> Result<Self, CalendarError> {
        let text = text.trim();
        let (days, times) = match text.split_once(char::is_whitespace) {
            Some((days, times)) => (Some(days), Some(times.trim_start())),
            None if text.starts_with(|first: char| first.is_ascii_digit()) => (None, Some(text)),
            None => (Some(text), None),
        };
        let days = days.map_or(Ok(EVERY_DAY), parse_days)?;
        let (from_minute, to_minute) = times.map_or(Ok((0, MINUTES_PER_DAY)), |times| {
            parse_times(times).ok_or_else(|| CalendarError::Times(times.to_owned()))
        })?;
        match from_minute == to_minute {
            true => Err(CalendarError::Empty),
            false => Ok(Self { days, from_minute, to_minute }),
        }
    }
}

fn parse_days(text: &str) -> Result<u8, CalendarError> {
    let day = |name: &str| {
        let is_name =
            |known: &&str| name.eq_ignore_ascii_case(known) || name.eq_ignore_ascii_case(&known[..SHORT]);
        DAYS.iter().position(is_name).ok_or_else(|| CalendarError::Day(name.to_owned()))
    };
    let mut days = 0;
    for part in text.split(',') {
        let (first, last) = part.split_once("..").unwrap_or((part, part));
        let (first, last) = (day(first)?, day(last)?);
        // `Sat..Mon` continues in the next week.
        let count = (last + 7 - first) % 7 + 1;
        days |= (first..first + count).fold(0, |days, day| days | 1 << (day % 7));
    }
    Ok(days)
}

fn parse_times(text: &str) -> Option<(u32, u32)> {
    let (from, to) = text.split_once('-')?;
    let minute = |text: &str| {
        let (hour, minute) = text.trim().split_once(':')?;
        let number = |text: &str| {
            let is_number = (1..=2).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse::<u32>().ok())?
        };
        let (hour, minute) = (number(hour)?, number(minute)?);
        (minute < 60).then_some(hour * 60 + minute)
    };
    let (from, to) = (minute(from)?, minute(to)?);
    (from < MINUTES_PER_DAY && to <= MINUTES_PER_DAY).then_some((from, to))
}

impl fmt::Display for CalendarRange {
    /// Text that parses as the same range.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.days != EVERY_DAY {
            write_days(self.days, f)?;
            f.write_str(" ")?;
        }
        let (from, to) = (self.from_minute, self.to_minute);
        write!(f, "{:02}:{:02}-{:02}:{:02}", from / 60, from % 60, to / 60, to % 60)
    }
}

/// Writes days in ranges of three or more, else one by one: `Mon..Fri`, `Sat,Sun`.
fn write_days(days: u8, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let is_set = |day: usize| days & 1 << day != 0;
    let mut day = 0;
    let mut separator = "";
    while day < DAYS.len() {
        let count = (day..DAYS.len()).take_while(|&day| is_set(day)).count();
        if count >= 3 {
            write!(f, "{separator}{}..{}", &DAYS[day][..SHORT], &DAYS[day + count - 1][..SHORT])?;
        } else {
            for name in &DAYS[day..day + count] {
                write!(f, "{separator}{}", &name[..SHORT])?;
                separator = ",";
            }
        }
        if count > 0 {
            separator = ",";
        }
        day += count.max(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    fn contains(text: &str, day: u32, hour: u32, minute: u32) -> bool {
        let range: CalendarRange = text.parse().expect("a range");
        range.contains(day * MINUTES_PER_DAY + hour * 60 + minute)
    }

    #[test]
    fn ranges_may_cross_midnight_and_the_week() {
        for (text, day, hour, minute, expect) in [
            ("Mon..Fri 22:00-06:00", 0, 22, 0, true),
            ("Mon..Fri 22:00-06:00", 0, 5, 59, false),
            ("Mon..Fri 22:00-06:00", 1, 5, 59, true),
            ("Mon..Fri 22:00-06:00", 1, 6, 0, false),
            ("Mon..Fri 22:00-06:00", 5, 3, 0, true),
            ("Mon..Fri 22:00-06:00", 5, 22, 0, false),
            ("Sun 22:00-06:00", 0, 5, 0, true),
            ("Sat..Mon", 0, 12, 0, true),
            ("Sat..Mon", 1, 0, 0, false),
            ("22:00-24:00", 3, 23, 59, true),
            ("22:00-24:00", 3, 0, 0, false),
            ("22:00-00:00", 3, 23, 59, true),
            ("22:00-00:00", 3, 0, 0, false),
            ("sunday,WED 0:00-24:00", 2, 0, 0, true),
        ] {
            assert_eq!(contains(text, day, hour, minute), expect, "{text} at {day} {hour}:{minute}");
        }
    }

    #[test]
    fn texts_round_trip() {
        for (text, written) in [
            ("Mon..Fri 22:00-06:00", "Mon..Fri 22:00-06:00"),
            ("Sun,Sat", "Sat,Sun 00:00-24:00"),
            ("8:30-9:05", "08:30-09:05"),
            ("Sat..Mon 1:00-2:00", "Mon,Sat,Sun 01:00-02:00"),
            ("Mon..Sun 00:00-24:00", "00:00-24:00"),
        ] {
            let range: CalendarRange = text.parse().expect("a range");
            assert_eq!(range.to_string(), written);
            assert_eq!(written.parse(), Ok(range));
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (text, rule) in [
            ("Mo..Fri 1:00-2:00", "has no day \"Mo\" (write days as in Mon..Fri or Sat,Sun)"),
            ("", "has no day \"\" (write days as in Mon..Fri or Sat,Sun)"),
            ("Mon 22", "has no range of times in \"22\" (write it as in 22:00-06:00, up to 24:00)"),
            (
                "22:00-25:00",
                "has no range of times in \"22:00-25:00\" (write it as in 22:00-06:00, up to 24:00)",
            ),
            (
                "24:00-6:00",
                "has no range of times in \"24:00-6:00\" (write it as in 22:00-06:00, up to 24:00)",
            ),
            ("Mon 6:00-6:00", "begins and ends at the same time (write 00:00-24:00 for whole days)"),
            ("Mon 0:00-0:00", "begins and ends at the same time (write 00:00-24:00 for whole days)"),
        ] {
            assert_eq!(
                text.parse::<CalendarRange>().map_err(|rule| rule.to_string()),
                Err(rule.to_owned()),
                "{text}"
            );
        }
    }
}
