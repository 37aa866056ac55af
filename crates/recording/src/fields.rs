//! Fields of a line and the numbers in them, without copies.
//!
//! Functions that are called for every field are force-inlined: without that, parsing a record
//! took 50 % longer.

use super::error::shown;

pub(super) struct LineFields<'a> {
    /// `None` after the last field.
    rest: Option<&'a [u8]>,
}

impl<'a> LineFields<'a> {
    pub(super) fn new(line: &'a [u8]) -> Self {
        Self { rest: Some(line) }
    }

    #[inline(always)]
    pub(super) fn text(&mut self, field_name: &str) -> Result<&'a [u8], String> {
        let rest = self.rest.ok_or_else(|| missing(field_name))?;
        match rest.iter().position(|&byte| byte == b',') {
            Some(end) => {
                self.rest = Some(&rest[end + 1..]);
                Ok(&rest[..end])
            }
            None => {
                self.rest = None;
                Ok(rest)
            }
        }
    }

    /// Returns a field without its quotes; doubled quotes (RFC 4180, section 2) are undone in
    /// `buffer`.
    #[inline(always)]
    pub(super) fn quotable<'b>(
        &mut self,
        field_name: &str,
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], String>
    where
        'a: 'b,
    {
        match self.rest {
            Some([b'"', ..]) => self.unquote(field_name, buffer),
            _ => self.text(field_name),
        }
    }

    #[cold]
    fn unquote<'b>(&mut self, field_name: &str, buffer: &'b mut Vec<u8>) -> Result<&'b [u8], String> {
        let field = self.rest.take().unwrap_or_default();
        let unterminated =
            || format!("the quoted {field_name} {} does not end with its closing quote", shown(field));
        buffer.clear();
        let mut inside = field.get(1..).unwrap_or_default();
        loop {
            let end = inside.iter().position(|&byte| byte == b'"').ok_or_else(unterminated)?;
            buffer.extend_from_slice(&inside[..end]);
            match &inside[end + 1..] {
                [b'"', rest @ ..] => {
                    buffer.push(b'"');
                    inside = rest;
                }
                [b',', rest @ ..] => {
                    self.rest = Some(rest);
                    return Ok(buffer);
                }
                [] => return Ok(buffer),
                _ => return Err(unterminated()),
            }
        }
    }

    #[inline(always)]
    pub(super) fn number(&mut self, field_name: &str) -> Result<u64, String> {
        let Some(rest) = self.rest else { return Err(missing(field_name)) };
        let (value, digits) = leading_number(rest);
        // Longer numbers, and anything else, take the slow path.
        if (1..=MAX_PLAIN_DIGITS).contains(&digits) {
            match rest.get(digits) {
                Some(b',') => {
                    self.rest = Some(&rest[digits + 1..]);
                    return Ok(value);
                }
                None => {
                    self.rest = None;
                    return Ok(value);
                }
                Some(_) => {}
            }
        }
        self.uncommon_number(field_name)
    }

    #[cold]
    fn uncommon_number(&mut self, field_name: &str) -> Result<u64, String> {
        let field = self.text(field_name)?;
        number(field, field_name)
    }

    #[inline]
    pub(super) fn end(&self) -> Result<(), String> {
        match self.rest {
            None => Ok(()),
            Some(rest) => Err(format!("the line has more fields than the format: {}", shown(rest))),
        }
    }
}

/// Value and number of the leading digits; the value is meaningless beyond [`MAX_PLAIN_DIGITS`].
///
/// Most of the cost of reading a trace is here, so it processes eight digits at a time.
#[inline(always)]
fn leading_number(text: &[u8]) -> (u64, usize) {
    const TENS: [u64; 9] = [1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];
    let (mut value, mut digits) = (0u64, 0);
    let mut rest = text;
    while let Some((eight, more)) = rest.split_first_chunk() {
        let (part, count) = parse_up_to_eight_digits(*eight);
        value = value.wrapping_mul(TENS[count]).wrapping_add(part);
        digits += count;
        if count < 8 {
            return (value, digits);
        }
        rest = more;
    }
    for &byte in rest {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            break;
        }
        value = value.wrapping_mul(10).wrapping_add(u64::from(digit));
        digits += 1;
    }
    (value, digits)
}

#[inline(always)]
fn parse_up_to_eight_digits(text: [u8; 8]) -> (u64, usize) {
    const fn repeat_byte(byte: u8) -> u64 {
        u64::from_le_bytes([byte; 8])
    }
    // The first byte is the least significant. Each byte becomes the value of its digit, or above
    // 9 for other characters.
    let values = u64::from_le_bytes(text) ^ repeat_byte(b'0');
    // Sets the highest bit of each byte that is above 9: it is set already, or carried from adding
    // 0x76 to the lower seven bits.
    let non_digits = (((values & repeat_byte(0x7f)) + repeat_byte(0x76)) | values) & repeat_byte(0x80);
    let count = non_digits.trailing_zeros() as usize / 8;
    // A shift by 64 bits below would overflow.
    if count == 0 {
        return (0, 0);
    }
    // Moves the digits to the end, so that the missing ones count as leading zeroes.
    let values = values << (64 - 8 * count);
    // Combines pairs of digits, then pairs of pairs, then the two halves.
    let values = (values.wrapping_mul(10) + (values >> 8)) & 0x00ff_00ff_00ff_00ff;
    let values = (values.wrapping_mul(100) + (values >> 16)) & 0x0000_ffff_0000_ffff;
    let value = (values.wrapping_mul(10_000) + (values >> 32)) & 0xffff_ffff;
    (value, count)
}

// Number of decimal digits that always fit into 64 bits.
const MAX_PLAIN_DIGITS: usize = 19;

#[inline]
pub(super) fn number(field: &[u8], field_name: &str) -> Result<u64, String> {
    let (value, digits) = leading_number(field);
    if digits == field.len() && (1..=MAX_PLAIN_DIGITS).contains(&digits) {
        return Ok(value);
    }
    careful_number(field, field_name)
}

/// Parses seconds with an optional fraction; returns nanoseconds and drops finer digits.
pub(super) fn seconds(field: &[u8], field_name: &str) -> Result<u64, String> {
    const S_NS: u64 = 1_000_000_000;
    let dot = memchr::memchr(b'.', field).unwrap_or(field.len());
    let (whole_s, fraction) = (number(&field[..dot], field_name)?, field.get(dot + 1..).unwrap_or_default());
    if !fraction.iter().all(u8::is_ascii_digit) {
        return Err(format!("the {field_name} {} is not a number of seconds", shown(field)));
    }
    // A fraction is padded with zeroes to nine digits.
    let digits = fraction.iter().map(|digit| u64::from(digit - b'0')).chain(std::iter::repeat(0));
    let fraction_ns = digits.take(9).fold(0, |ns, digit| ns * 10 + digit);
    whole_s
        .checked_mul(S_NS)
        .and_then(|ns| ns.checked_add(fraction_ns))
        .ok_or_else(|| format!("the {field_name} {} does not fit into 64 bits of nanoseconds", shown(field)))
}

#[cold]
fn careful_number(field: &[u8], field_name: &str) -> Result<u64, String> {
    let value = |value: u64, &byte: &u8| {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 { None } else { value.checked_mul(10)?.checked_add(u64::from(digit)) }
    };
    match field.iter().try_fold(0, value) {
        Some(value) if !field.is_empty() => Ok(value),
        _ => Err(not_a_number(field, field_name)),
    }
}

#[cold]
fn missing(field_name: &str) -> String {
    format!("the {field_name} is missing (a truncated line?)")
}

#[cold]
fn not_a_number(field: &[u8], field_name: &str) -> String {
    let digits = |field: &[u8]| !field.is_empty() && field.iter().all(u8::is_ascii_digit);
    // A precise reason, because the cause is often a wrong column.
    let why = match field {
        [] => return missing(field_name),
        [b'-', rest @ ..] if digits(rest) => "is negative",
        _ if digits(field) => "does not fit into 64 bits",
        _ => "is not a whole number",
    };
    format!("the {field_name} {} {why}", shown(field))
}

/// Appends a number in decimal.
pub fn push_decimal(text: &mut Vec<u8>, mut value: u64) {
    // 2^64 has 20 digits.
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    text.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_parsed_and_others_rejected() {
        let read = |text: &'static str| LineFields::new(text.as_bytes()).number("offset");
        for (text, value) in [
            ("0", 0),
            ("7,x", 7),
            ("0000000000000000000000000001,", 1),
            ("18446744073709551615", u64::MAX),
            ("18446744073709551615,1", u64::MAX),
            ("9999999999999999999,", 9_999_999_999_999_999_999),
        ] {
            assert_eq!(read(text), Ok(value), "{text}");
        }
        for (text, why) in [
            ("", "the offset is missing (a truncated line?)"),
            (",1", "the offset is missing (a truncated line?)"),
            ("18446744073709551616,", "the offset '18446744073709551616' does not fit into 64 bits"),
            ("99999999999999999999999", "the offset '99999999999999999999999' does not fit into 64 bits"),
            ("-5,", "the offset '-5' is negative"),
            ("-", "the offset '-' is not a whole number"),
            ("1.5,2", "the offset '1.5' is not a whole number"),
            ("+1", "the offset '+1' is not a whole number"),
            (" 1", "the offset ' 1' is not a whole number"),
            ("0x10", "the offset '0x10' is not a whole number"),
        ] {
            assert_eq!(read(text).unwrap_err(), why, "{text}");
        }
    }

    #[test]
    fn seconds_accept_any_fraction() {
        let read = |text: &str| seconds(text.as_bytes(), "time");
        for (text, ns) in [
            ("0", 0),
            ("7.", 7_000_000_000),
            ("0.000774", 774_000),
            ("3.0000000019", 3_000_000_001),
            ("18446744073.709551615", u64::MAX),
        ] {
            assert_eq!(read(text), Ok(ns), "{text}");
        }
        for text in ["", ".5", "-1.0", "1.5e3", "1.2.3", "18446744073.709551616", "18446744074"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn parsing_stops_after_the_last_digit() {
        // Every other byte after 0 to 23 digits, which are parsed in up to three steps of eight.
        let digits = b"123456789012345678901234";
        for count in 0..digits.len() {
            for other in (0..=u8::MAX).filter(|byte| !byte.is_ascii_digit()) {
                let mut text = digits[..count].to_vec();
                text.push(other);
                text.extend_from_slice(b"99999999");
                let (value, found) = leading_number(&text);
                assert_eq!(found, count);
                if (1..=MAX_PLAIN_DIGITS).contains(&count) {
                    assert_eq!(Ok(value), careful_number(&digits[..count], "number"));
                }
            }
        }
    }

    #[test]
    fn fields_round_trip() {
        for value in [0, 1, 9, 10, 99, 100, 12_345_678_901, u64::MAX - 1, u64::MAX] {
            let mut text = Vec::new();
            push_decimal(&mut text, value);
            assert_eq!(text, value.to_string().into_bytes());
            assert_eq!(number(&text, "number"), Ok(value));
        }
    }

    #[test]
    fn quoted_field_may_contain_commas_and_quotes() {
        let read = |line: &'static str| {
            let mut buffer = Vec::new();
            let mut fields = LineFields::new(line.as_bytes());
            let name = fields.quotable("disk", &mut buffer).map(<[u8]>::to_vec)?;
            Ok::<_, String>((String::from_utf8(name).unwrap(), fields.text("next").is_ok()))
        };
        let field = |name: &str, more| Ok((name.to_owned(), more));
        assert_eq!(read("8,0"), field("8", true));
        assert_eq!(read("\"8,0\",x"), field("8,0", true));
        assert_eq!(read("\"\"\"a\"\"\""), field("\"a\"", false));
        assert_eq!(read("a\"b,x"), field("a\"b", true));
        for line in ["\"8,0", "\"", "\"a\"b,x", "\"a\"\""] {
            assert!(read(line).unwrap_err().contains("does not end with its closing quote"), "{line}");
        }
    }

    #[test]
    fn missing_and_extra_fields_are_rejected() {
        let mut fields = LineFields::new(b"a,,c");
        assert_eq!(fields.text("one"), Ok(&b"a"[..]));
        assert!(fields.end().is_err());
        assert_eq!(fields.text("two"), Ok(&b""[..]));
        assert_eq!(fields.text("three"), Ok(&b"c"[..]));
        assert_eq!(fields.end(), Ok(()));
        assert_eq!(fields.text("four"), Err("the four is missing (a truncated line?)".to_owned()));
    }
}
