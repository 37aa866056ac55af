//! Parsers of user input: IMAGE as a path, `memory:SIZE`, `null:SIZE`, `rbd:POOL/IMAGE` or an NBD
//! URI; sizes and durations.
//!
//! Sizes are QEMU's: a number, perhaps with a fraction, and `K`, `M`, `G`, `T`, `P` or `E` for
//! powers of 1024. All arithmetic is on integers: `1.5G` is exact, and a value that does not fit is
//! an error, never a wrapped number.

use std::{path::PathBuf, str::FromStr};

use policy::time::Duration;

use super::{InvalidValue, rbd};
use nbd::uri::Uri;

const SIZE_RULE: &str = "is not a size (a number of bytes, perhaps with K, M, G, T, P or E for \
                         powers of 1024: 512, 64K, 1.5G; KB is 1000, and so on)";
const SIZE_LEAST: &str = "is less than a byte (write 0 for none)";
const SIZE_BOUND: &str = "is too large (sizes are below 8E)";
const DURATION_RULE: &str = "is not a duration (a number with ns, us, ms or s: 100us, 2.5ms, 1s)";

/// Significant digits after the point; 18 are more than the largest unit needs.
const FRACTION_DIGITS: u32 = 18;

/// Returns `number · unit`, rounded down. `number` is digits, perhaps with a point and more digits.
fn scale(number: &str, unit: u64) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let all_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !all_digits(whole) || !all_digits(fraction) || number.ends_with('.') {
        return None;
    }
    // A number with more digits than a u64 is either padded with zeroes or too large anyway, so the
    // bound is enough.
    let whole: u128 = whole.parse::<u64>().map_or(u128::from(u64::MAX), u128::from);
    let fraction = &fraction[..fraction.len().min(FRACTION_DIGITS as usize)];
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let denominator = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    Some(whole * u128::from(unit) + part * u128::from(unit) / denominator)
}

/// Parses a size in bytes: `512`, `64K`, `1.5G`, `100MiB`, `0x10000`; upper or lower case. `K`,
/// `Ki` and `KiB` are 1024 bytes, `KB` is 1000. A fraction of a byte is rounded down.
///
/// # Errors
/// Fails for text of another form, for a size above 0 and below one byte, and for 2⁶³ bytes or more
/// (no file is that large).
pub fn parse_size(text: &str) -> Result<u64, InvalidValue> {
    let invalid = || match without_time(text).filter(|size| parse_size(size).is_ok()) {
        Some(size) => {
            let rule = format!("is a rate; limits are per second already (write {size})");
            InvalidValue::new(text, rule)
        }
        None => InvalidValue::new(text, SIZE_RULE),
    };
    let bytes = if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        // `from_str_radix` accepts a sign.
        let is_hex = !hex.is_empty() && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        u128::from(if is_hex {
            u64::from_str_radix(hex, 16).unwrap_or(u64::MAX)
        } else {
            return Err(invalid());
        })
    } else {
        let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
        let (number, suffix) = text.split_at(split);
        let bytes = unit(suffix).and_then(|unit| scale(number, unit)).ok_or_else(invalid)?;
        // 0 often means "no limit", so a small non-zero value must not be rounded to it.
        if bytes == 0 && number.contains(|digit: char| matches!(digit, '1'..='9')) {
            return Err(InvalidValue::new(text, SIZE_LEAST));
        }
        bytes
    };
    let bytes = i64::try_from(bytes).map_err(|_| InvalidValue::new(text, SIZE_BOUND))?;
    Ok(bytes.unsigned_abs())
}

/// The text without `/s` or `ps` at its end.
fn without_time(text: &str) -> Option<&str> {
    ["/s", "/S", "ps"].iter().find_map(|per_second| text.strip_suffix(per_second))
}

/// Number of bytes that a suffix stands for.
fn unit(suffix: &str) -> Option<u64> {
    let suffix = suffix.to_ascii_lowercase();
    let power = |base: u64| Some(base.pow(1 + "kmgtpe".find(suffix.get(..1)?)? as u32));
    match suffix.get(1..).unwrap_or_default() {
        "" if suffix.is_empty() || suffix == "b" => Some(1),
        "" | "i" | "ib" => power(1024),
        "b" => power(1000),
        _ => None,
    }
}

/// Parses a duration: `100us`, `2.5ms`, `1s`. The unit is required, except for 0.
///
/// # Errors
/// Fails for text of another form and for durations above 584 years.
pub fn parse_duration(text: &str) -> Result<Duration, InvalidValue> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit_ns = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "" if number == "0" => 1,
        "" if scale(number, 1).is_some() => {
            let rule = format!("has no unit (write {number}s for seconds, or {number}ms)");
            return Err(InvalidValue::new(text, rule));
        }
        _ => return Err(InvalidValue::new(text, DURATION_RULE)),
    };
    let nanos = scale(number, unit_ns).and_then(|nanos| u64::try_from(nanos).ok());
    nanos.map(Duration::from_nanos).ok_or_else(|| InvalidValue::new(text, DURATION_RULE))
}

/// Formats a duration so that [`parse_duration`] reads the exact value, in the largest unit that
/// divides it.
#[must_use]
pub fn show_duration(time: Duration) -> String {
    const UNITS: [(u128, &str); 3] = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")];
    let nanos = time.as_nanos();
    let unit = UNITS.into_iter().find(|(unit_ns, _)| nanos.is_multiple_of(*unit_ns));
    let (unit_ns, unit) = unit.unwrap_or((1, "ns"));
    format!("{}{unit}", nanos / unit_ns)
}

/// Location of an image, as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StorageSpec {
    /// A path; `file:PATH` for names that would parse as another form.
    File(PathBuf),
    /// `memory:SIZE`, in bytes.
    Memory(u64),
    /// `null:SIZE`, in bytes.
    Null(u64),
    /// An export of an NBD server, by URI.
    Nbd(Box<Uri>),
    /// `rbd:POOL/IMAGE`, an image of a Ceph cluster.
    Rbd(Box<rbd::RbdAddress>),
}

impl FromStr for StorageSpec {
    type Err = InvalidValue;
    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        if let Some(size) = text.strip_prefix("memory:") {
            return parse_size(size).map(Self::Memory);
        }
        if let Some(size) = text.strip_prefix("null:") {
            return parse_size(size).map(Self::Null);
        }
        if let Some(address) = text.strip_prefix("rbd:") {
            return rbd::RbdAddress::read(address).map(|address| Self::Rbd(Box::new(address)));
        }
        // `file:nbd:x` is a path, since it does not begin like an NBD URI.
        if Uri::looks_like_uri(text) {
            let uri = Uri::parse(text).map_err(|rule| InvalidValue::new(text, rule))?;
            return Ok(Self::Nbd(Box::new(uri)));
        }
        let path = text.strip_prefix("file:").unwrap_or(text);
        if path.is_empty() || path.contains('\0') {
            return Err(InvalidValue::new(
                text,
                "is not an image (a path, memory:SIZE, null:SIZE, rbd:POOL/IMAGE or nbd://HOST/EXPORT)",
            ));
        }
        Ok(Self::File(PathBuf::from(path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_qemu_reads_them() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512b", 512),
            ("1K", 1024),
            ("1k", 1024),
            ("64M", 64 << 20),
            ("1.5G", 3 << 29),
            ("0.5k", 512),
            ("2T", 2 << 40),
            ("1P", 1 << 50),
            ("7E", 7 << 60),
            ("0x10000", 65536),
            ("0Xff", 255),
            ("100MiB", 100 << 20),
            ("1Ki", 1024),
            ("100MB", 100_000_000),
            ("1.5kb", 1500),
            ("9223372036854775807", i64::MAX.unsigned_abs()),
            ("000000000000000000000001", 1),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_named_in_the_error() {
        for text in [
            "",
            "K",
            "-1",
            "1..5G",
            "1.G",
            ".5G",
            "1 G",
            "1X",
            "0x",
            "0x-1",
            "0x1K",
            "1KiBB",
            "1iB",
            "1bb",
            "0.4",
            "0.0001K",
            "8E",
            "0x8000000000000000",
            "99999999999999999999",
            "∞",
            "1é",
        ] {
            let error = parse_size(text).expect_err(text);
            assert_eq!(error.value, text);
        }
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(parse_duration("5ms"), Ok(Duration::from_millis(5)));
        assert_eq!(parse_duration("2.5us"), Ok(Duration::from_nanos(2_500)));
        assert_eq!(parse_duration("100ns"), Ok(Duration::from_nanos(100)));
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        for text in ["5", "ms", "5 ms", "-5ms", "1h", "99999999999999999999s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_spec_without_prefix_is_a_path() {
        assert_eq!("memory:1G".parse(), Ok(StorageSpec::Memory(1 << 30)));
        assert_eq!("null:1".parse(), Ok(StorageSpec::Null(1)));
        assert!(matches!("rbd:vms/vm1".parse(), Ok(StorageSpec::Rbd(address)) if address.image == "vm1"));
        assert!("rbd:vm1".parse::<StorageSpec>().is_err());
        assert_eq!("vm.raw".parse(), Ok(StorageSpec::File("vm.raw".into())));
        assert_eq!("file:memory:1".parse(), Ok(StorageSpec::File("memory:1".into())));
        assert!("".parse::<StorageSpec>().is_err());
        assert!(matches!("nbd://host/vm1".parse(), Ok(StorageSpec::Nbd(_))));
        assert_eq!("file:nbd:x".parse(), Ok(StorageSpec::File("nbd:x".into())));
        assert!(matches!("nbd:host:10809".parse(), Ok(StorageSpec::Nbd(_))));
        assert!("nbd:host".parse::<StorageSpec>().is_err());
        assert!("memory:lots".parse::<StorageSpec>().is_err());
    }
}
