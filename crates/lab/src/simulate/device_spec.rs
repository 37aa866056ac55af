//! `--device`: properties of a device, with the keys of `--delay` and `--rate`, or the path of a
//! probed one.

use std::{path::PathBuf, str::FromStr};

use storage::{delay::DelayOptions, rate::RateOptions};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DeviceSpec {
    Modelled { delay: DelayOptions, rate: RateOptions },
    Probed(PathBuf),
}

impl FromStr for DeviceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A path with an equals sign is recognized by a slash before that sign.
        let first = text.split('=').next().unwrap_or_default();
        let is_path = first.contains('/') || !text.contains('=');
        if is_path {
            return if text.is_empty() {
                Err("is empty (name a device, or give its properties)".to_owned())
            } else {
                Ok(Self::Probed(text.into()))
            };
        }
        let (mut delay, mut rate) = (Vec::new(), Vec::new());
        for pair in text.split(',') {
            // Translates the keys to those of the `delay` and `rate` options, whose parsers check
            // the values.
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match key {
                "read" | "write" | "zero" | "flush" | "parallel" => delay.push(pair.to_owned()),
                "bps" => rate.push(format!("bytes={value}")),
                "iops" => rate.push(pair.to_owned()),
                "read-bps" => rate.push(format!("read={value}")),
                "write-bps" => rate.push(format!("write={value}")),
                _ => {
                    return Err(format!(
                        "{key:?} is no property of a device (there are read, write, zero, flush, \
                         parallel, bps, iops, read-bps and write-bps)"
                    ));
                }
            }
        }
        let delay = if delay.is_empty() { Ok(DelayOptions::default()) } else { delay.join(",").parse() };
        let rate = if rate.is_empty() { Ok(RateOptions::default()) } else { rate.join(",").parse() };
        // The error names the translated key, such as `bytes` for `bps`.
        let rule = |error: storage::InvalidOption| format!("{}={} {}", error.key, error.value, error.rule);
        Ok(Self::Modelled { delay: delay.map_err(rule)?, rate: rate.map_err(rule)? })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn device_spec_has_the_keys_of_delay_and_rate() {
        let choice: DeviceSpec =
            "read=100us,write=200us,flush=1ms,parallel=32,write-bps=100M".parse().unwrap();
        let DeviceSpec::Modelled { delay, rate } = choice else { panic!("a path") };
        assert_eq!((delay.read, delay.parallel), (Duration::from_micros(100), Some(32)));
        assert_eq!((rate.write, rate.bytes), (Some(100 << 20), None));
    }

    #[test]
    fn spec_without_equals_sign_is_a_path() {
        for path in ["/dev/sda", ".", "/srv/a=b"] {
            assert_eq!(path.parse(), Ok(DeviceSpec::Probed(path.into())));
        }
    }

    #[test]
    fn unknown_key_is_named() {
        let error = |text: &str| text.parse::<DeviceSpec>().unwrap_err();
        assert!(error("reed=5ms").starts_with("\"reed\" is no property of a device"));
        assert!(error("read=fast").starts_with("read=fast is not a duration"));
        assert!(error("").contains("empty"));
    }
}
