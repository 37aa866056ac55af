//! Parser of big-endian fields in a slice that may be too short.
//!
//! Each method consumes the field that it returns; `None` if the slice is too short. Never
//! allocates: announced lengths are only compared with bytes that arrived.

use super::proto::MAX_STRING_BYTES;

/// The unparsed rest of a slice.
#[derive(Clone, Copy, Debug)]
pub struct WireFields<'a>(&'a [u8]);

impl<'a> WireFields<'a> {
    /// A parser that has consumed nothing of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    /// Consumes a 16-bit field.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// Consumes a 32-bit field.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// Consumes a 64-bit field.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Consumes a 32-bit length and a string ("Conventions": UTF-8, no NUL, at most 4096 bytes).
    pub fn string(&mut self) -> Option<&'a str> {
        let length = usize::try_from(self.u32()?).ok()?;
        let (head, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        string(head)
    }

    /// True if all bytes are consumed.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }
}

/// The bytes as a string of the protocol; `None` if they are not a valid one.
pub fn string(bytes: &[u8]) -> Option<&str> {
    if bytes.len() > MAX_STRING_BYTES || bytes.contains(&0) {
        return None;
    }
    std::str::from_utf8(bytes).ok()
}

/// Truncates `text` to the maximum length of a string, at a character boundary.
pub fn truncated(text: &str) -> &str {
    let mut end = text.len().min(MAX_STRING_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_longer_than_its_message_is_none() {
        assert_eq!(WireFields::new(b"\0\0\0\x03ab").string(), None);
        assert_eq!(WireFields::new(b"\0\0\0\x02ab").string(), Some("ab"));
        assert_eq!(WireFields::new(b"\xff\xff\xff\xffab").string(), None);
    }

    #[test]
    fn strings_are_utf8_without_nul_and_at_most_4096_bytes() {
        assert_eq!(string(b"a\0b"), None);
        assert_eq!(string(b"\xff"), None);
        assert!(string(&[b'a'; 4096]).is_some());
        assert!(string(&[b'a'; 4097]).is_none());
    }

    #[test]
    fn clipping_keeps_characters_whole() {
        let long = "é".repeat(2049);
        assert_eq!(truncated(&long).len(), 4096);
        let odd = format!("a{long}");
        assert_eq!(truncated(&odd).len(), 4095);
        assert_eq!(truncated("short"), "short");
    }
}
