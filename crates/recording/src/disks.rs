//! Names of a trace's disks, or of its limits, and their numbers.
//!
//! Looking up one of the most recent names costs one comparison and no hashing.

use std::collections::HashMap;

use super::{error::shown, record::DiskId};

// The largest published trace has 5584 disks.
const MAX_DISKS: usize = 1_000_000;
// PATH_MAX of Linux: fio's traces use file names.
const MAX_NAME_BYTES: usize = 4096;
const MAX_NAMES_BYTES: usize = 64 << 20;
const RECENT: usize = 256;

/// Names of disks with their numbers, in order of appearance.
pub struct TraceDisks {
    names: Vec<String>,
    ids: HashMap<String, DiskId>,
    recent: [DiskId; RECENT],
    bytes: usize,
}

impl Default for TraceDisks {
    fn default() -> Self {
        Self { names: Vec::new(), ids: HashMap::new(), recent: [DiskId(0); RECENT], bytes: 0 }
    }
}

impl TraceDisks {
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the number of the disk with this name, which is added if it is new.
    ///
    /// # Errors
    /// The name is invalid, or there are too many names.
    #[inline(always)]
    pub fn id(&mut self, name: &[u8]) -> Result<DiskId, String> {
        let place = mark(name);
        let recent = self.recent[place];
        if self.names.get(recent.index()).is_some_and(|known| known.as_bytes() == name) {
            return Ok(recent);
        }
        let id = self.search(name)?;
        self.recent[place] = id;
        Ok(id)
    }

    #[cold]
    // Control characters are rejected: names are printed to terminals.
    fn search(&mut self, name: &[u8]) -> Result<DiskId, String> {
        let text = std::str::from_utf8(name).ok().filter(|name| !name.contains(char::is_control));
        let Some(text) = text else { return Err(format!("the disk name {} is not UTF-8", shown(name))) };
        if let Some(&id) = self.ids.get(text) {
            return Ok(id);
        }
        if text.is_empty() {
            return Err("the disk name is missing".to_owned());
        }
        if text.len() > MAX_NAME_BYTES {
            return Err(format!("the disk name {} is longer than {MAX_NAME_BYTES} bytes", shown(name)));
        }
        self.bytes += text.len();
        if self.names.len() == MAX_DISKS || self.bytes > MAX_NAMES_BYTES {
            return Err(format!(
                "disk {} exceeds the limits: a trace has at most {MAX_DISKS} disks, with names of \
                 at most {} MiB in total",
                shown(name),
                MAX_NAMES_BYTES >> 20,
            ));
        }
        let id = DiskId(u32::try_from(self.names.len()).expect("bounded by MAX_DISKS"));
        self.names.push(text.to_owned());
        self.ids.insert(text.to_owned(), id);
        Ok(id)
    }
}

// Hash of the length and the last bytes, in which names of disks differ.
#[inline]
fn mark(name: &[u8]) -> usize {
    let byte = |from_end: usize| name.len().checked_sub(from_end).map_or(0, |at| usize::from(name[at]));
    (byte(1) ^ byte(2) << 3 ^ byte(3) << 5 ^ name.len() << 7) % RECENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_keeps_its_number() {
        let mut disks = TraceDisks::default();
        let names: Vec<_> = (0..2000).map(|number| format!("vm{number}")).collect();
        for _ in 0..3 {
            for (number, name) in names.iter().enumerate() {
                assert_eq!(disks.id(name.as_bytes()).unwrap().index(), number);
            }
        }
        assert_eq!(disks.names(), names);
    }

    #[test]
    fn invalid_names_are_rejected() {
        let mut disks = TraceDisks::default();
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for (name, why) in [
            (&b""[..], "the disk name is missing"),
            (b"a\xff", r"the disk name 'a\xff' is not UTF-8"),
            (b"a\x1b[1m", r"the disk name 'a\x1b[1m' is not UTF-8"),
            (long.as_bytes(), "is longer than 4096 bytes"),
        ] {
            let error = disks.id(name).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(disks.names().is_empty());
    }

    #[test]
    fn total_name_length_is_bounded() {
        let mut disks = TraceDisks::default();
        for number in 0..MAX_DISKS {
            disks.id(number.to_string().as_bytes()).unwrap();
        }
        let error = disks.id(b"more").unwrap_err();
        assert!(
            error.starts_with("disk 'more' exceeds the limits: a trace has at most 1000000 disks"),
            "{error}"
        );
        assert_eq!(disks.id(b"999999").unwrap(), DiskId(999_999));
    }
}
