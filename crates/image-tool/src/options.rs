//! `-o key=value,key=value`: options of a format, in qemu-img's notation.
//!
//! A comma in a value is doubled. If a key is repeated the last value counts, as in qemu-img; an
//! unknown key is an error.

use storage::parse_size;

// Keys that may be given without a value, which means `on`.
const SWITCHES: [&str; 5] = ["data_file_raw", "encryption", "extended_l2", "lazy_refcounts", "nocow"];

/// Options of `-o`, each key once. Callers remove the keys that they support; the remaining ones
/// are unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FormatOptions(Vec<(String, String)>);

impl FormatOptions {
    /// Parses options. Fails for a key without a value that is not a switch.
    pub(super) fn read(texts: &[String]) -> Result<Self, String> {
        let mut options = Self::default();
        for text in texts {
            for pair in split(text).into_iter().filter(|pair| !pair.is_empty()) {
                let switched_on = || SWITCHES.contains(&&*pair).then_some((&*pair, "on"));
                let (key, value) = pair
                    .split_once('=')
                    .or_else(switched_on)
                    .ok_or_else(|| format!("{pair}: has no value (write {pair}=…)"))?;
                options.0.retain(|(known, _)| known != key);
                options.0.push((key.to_owned(), value.to_owned()));
            }
        }
        Ok(options)
    }

    /// True if help is requested anywhere among the options.
    pub(super) fn ask_for_help(texts: &[String]) -> bool {
        texts.iter().flat_map(|text| split(text)).any(|pair| pair == "help" || pair == "?")
    }

    pub(super) fn set_missing(&mut self, key: &str, value: &str) {
        if !self.has(key) {
            self.0.push((key.to_owned(), value.to_owned()));
        }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(known, _)| known == key)
    }

    pub(super) fn take(&mut self, key: &str) -> Option<String> {
        let at = self.0.iter().position(|(known, _)| known == key)?;
        Some(self.0.remove(at).1)
    }

    pub(super) fn take_as<T>(
        &mut self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.take(key) else { return Ok(None) };
        parse(&value).map(Some).map_err(|rule| format!("{key}={value}: {rule}"))
    }

    pub(super) fn take_size(&mut self, key: &str) -> Result<Option<u64>, String> {
        self.take_as(key, |value| parse_size(value).map_err(|error| error.rule.into_owned()))
    }

    pub(super) fn take_switch(&mut self, key: &str) -> Result<Option<bool>, String> {
        self.take_as(key, |value| match value {
            "on" | "yes" | "true" | "y" => Ok(true),
            "off" | "no" | "false" | "n" => Ok(false),
            _ => Err("is neither on nor off".to_owned()),
        })
    }

    pub(super) fn first_unused(&self) -> Option<&str> {
        self.0.first().map(|(key, _)| &**key)
    }

    pub(super) fn finish(self, format: &str) -> Result<(), String> {
        match self.0.into_iter().next() {
            None => Ok(()),
            Some((key, value)) => {
                Err(format!("{key}={value}: is not an option of {format} (-o help lists all)"))
            }
        }
    }
}

/// Splits at single commas; a doubled comma belongs to the value.
fn split(text: &str) -> Vec<String> {
    let mut pairs = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(next) = rest.next() {
        let is_end = next == ',' && rest.next_if_eq(&',').is_none();
        if is_end {
            pairs.push(String::new());
        } else if let Some(last) = pairs.last_mut() {
            last.push(next);
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<FormatOptions, String> {
        FormatOptions::read(&[text.to_owned()])
    }

    #[test]
    fn values_may_have_commas() {
        let mut options = read("backing_file=a,,b,size=1M").unwrap();
        assert_eq!(options.take("backing_file").unwrap(), "a,b");
        assert_eq!(options.take_size("size"), Ok(Some(1 << 20)));
        assert_eq!(options.finish("qcow2"), Ok(()));
    }

    #[test]
    fn the_last_of_a_key_counts() {
        let mut options =
            FormatOptions::read(&["a=1,a=2".to_owned(), "b=1".to_owned(), "a=3".to_owned()]).unwrap();
        assert_eq!(options.take("a").unwrap(), "3");
        assert_eq!((options.take("b").as_deref(), options.finish("raw")), (Some("1"), Ok(())));
    }

    #[test]
    fn help_may_follow_other_options() {
        for (text, expected) in
            [("help", true), ("size=1M,help", true), ("?", true), ("backing_file=help", false)]
        {
            assert_eq!(FormatOptions::ask_for_help(&[text.to_owned()]), expected, "{text}");
        }
    }

    #[test]
    fn a_switch_without_a_value_is_on() {
        for key in SWITCHES {
            let mut options = read(&format!("compat=1.1,{key}")).unwrap();
            assert_eq!(options.take_switch(key), Ok(Some(true)), "{key}");
        }
        let mut options = read("extended_l2,extended_l2=off").unwrap();
        assert_eq!(options.take_switch("extended_l2"), Ok(Some(false)));
        for key in ["cluster_size", "backing_file", "no_such_key"] {
            assert_eq!(read(key).unwrap_err(), format!("{key}: has no value (write {key}=…)"));
        }
    }

    #[test]
    fn unused_and_invalid_options_are_rejected() {
        assert_eq!(read("a").unwrap_err(), "a: has no value (write a=…)");
        assert!(read("a=1").unwrap().finish("raw").unwrap_err().starts_with("a=1: is not an option of raw"));
        let message = read("lazy_refcounts=maybe").unwrap().take_switch("lazy_refcounts").unwrap_err();
        assert_eq!(message, "lazy_refcounts=maybe: is neither on nor off");
    }
}
