//! Splits a byte stream into JSON values. Values may be separated by white space or nothing.
//!
//! ```text
//!           ┌──────────────── newline, control character, 0xff ◄──┐
//!           ▼                                                     │
//!   ──► between ──► in a value ──► complete ──► json::parse    skipping
//!                       │                                         ▲
//!                       └─────── a byte that no JSON permits ─────┘
//! ```
//!
//! Only the framing is parsed here: brackets and quotes determine the end of a value. An error
//! inside a value affects this value only. After an error of the framing, input is skipped up to
//! the end of the line, a control character or the byte 0xff, which never occurs in UTF-8.
//!
//! Never buffers more than [`MAX_MESSAGE_BYTES`].

use serde_json::Value;

use super::json;

/// Maximum bytes of one value. QEMU permits 64 MiB; weir's commands need far less than 1 KiB.
pub(crate) const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// Maximum nesting of arrays and objects. QEMU permits 1024; weir's commands need 4.
pub(crate) const MAX_DEPTH: u32 = 64;
/// Capacity kept for the next message.
const RETAINED_BYTES: usize = 16 << 10;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum StreamItem {
    Value(Value),
    Broken(String),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FramePosition {
    #[default]
    BetweenValues,
    Inside,
    Quoted,
    /// After a backslash.
    Escaped,
    /// In a number or word at the top level.
    Scalar,
    Skipping,
}

enum FrameStep {
    Skip,
    Take,
    Last,
    /// The value has ended before this byte.
    Ended,
    Invalid(String),
}

#[derive(Debug, Default)]
pub(crate) struct JsonStream {
    position: FramePosition,
    /// Stack of open brackets, innermost in the lowest bit: 1 is an object, 0 an array.
    brackets: u64,
    depth: u32,
    message: Vec<u8>,
}

impl JsonStream {
    /// Consumes bytes of `input` up to the end of a value; `None` after all are consumed.
    pub(crate) fn advance(&mut self, input: &mut &[u8]) -> Option<StreamItem> {
        while let [byte, rest @ ..] = *input {
            let byte = *byte;
            // One byte at a time: the state survives any split of the input.
            let step = self.step(byte);
            if !matches!(step, FrameStep::Ended) {
                *input = rest;
            }
            match step {
                FrameStep::Skip => {}
                FrameStep::Take if self.message.len() < MAX_MESSAGE_BYTES => self.message.push(byte),
                FrameStep::Take => {
                    let reason = format!("the message is longer than {MAX_MESSAGE_BYTES} bytes");
                    return Some(self.skip_broken(byte, &reason));
                }
                FrameStep::Last => {
                    self.message.push(byte);
                    return Some(self.complete());
                }
                FrameStep::Ended => return Some(self.complete()),
                FrameStep::Invalid(reason) => return Some(self.skip_broken(byte, &reason)),
            }
        }
        None
    }

    pub(super) fn buffered_bytes(&self) -> usize {
        self.message.len()
    }

    fn step(&mut self, byte: u8) -> FrameStep {
        match self.position {
            FramePosition::Skipping => {
                if ends_skipping(byte) {
                    self.position = FramePosition::BetweenValues;
                }
                FrameStep::Skip
            }
            FramePosition::BetweenValues if is_space(byte) => FrameStep::Skip,
            FramePosition::BetweenValues | FramePosition::Inside => self.outside_quotes(byte),
            FramePosition::Quoted => self.in_quotes(byte),
            FramePosition::Escaped if byte >= b' ' => {
                self.position = FramePosition::Quoted;
                FrameStep::Take
            }
            FramePosition::Escaped => unfinished_string(),
            FramePosition::Scalar if is_scalar(byte) => FrameStep::Take,
            // The byte belongs to the next value, and is examined again.
            FramePosition::Scalar => FrameStep::Ended,
        }
    }

    fn outside_quotes(&mut self, byte: u8) -> FrameStep {
        let inside = self.position == FramePosition::Inside;
        match byte {
            b'{' | b'[' if self.depth == MAX_DEPTH => {
                FrameStep::Invalid(format!("more than {MAX_DEPTH} arrays and objects within each other"))
            }
            b'{' | b'[' => {
                self.position = FramePosition::Inside;
                self.depth += 1;
                // 64 bits suffice for `MAX_DEPTH` levels.
                self.brackets = self.brackets << 1 | u64::from(byte == b'{');
                FrameStep::Take
            }
            b'}' | b']' if inside => self.close(byte),
            b'"' => {
                self.position = FramePosition::Quoted;
                FrameStep::Take
            }
            b',' | b':' if inside => FrameStep::Take,
            _ if inside && (is_space(byte) || is_scalar(byte)) => FrameStep::Take,
            _ if is_scalar(byte) => {
                self.position = FramePosition::Scalar;
                FrameStep::Take
            }
            b'}' | b']' | b',' | b':' => {
                FrameStep::Invalid(format!("expecting value, not '{}'", char::from(byte)))
            }
            _ if byte.is_ascii_graphic() => FrameStep::Invalid(format!("stray '{}'", char::from(byte))),
            _ => FrameStep::Invalid(format!("stray byte 0x{byte:02x}")),
        }
    }

    fn close(&mut self, byte: u8) -> FrameStep {
        let is_object = self.brackets & 1 == 1;
        if is_object != (byte == b'}') {
            let right = if is_object { '}' } else { ']' };
            return FrameStep::Invalid(format!("expecting '{right}', not '{}'", char::from(byte)));
        }
        self.brackets >>= 1;
        self.depth -= 1;
        if self.depth == 0 { FrameStep::Last } else { FrameStep::Take }
    }

    fn in_quotes(&mut self, byte: u8) -> FrameStep {
        match byte {
            b'"' if self.depth == 0 => FrameStep::Last,
            b'"' => {
                self.position = FramePosition::Inside;
                FrameStep::Take
            }
            b'\\' => {
                self.position = FramePosition::Escaped;
                FrameStep::Take
            }
            // Control characters must be escaped in JSON strings (RFC 8259, section 7).
            0xff | 0..b' ' => unfinished_string(),
            _ => FrameStep::Take,
        }
    }

    fn complete(&mut self) -> StreamItem {
        let parsed = json::parse(&self.message);
        self.restart();
        parsed.map_or_else(|reason| StreamItem::Broken(parse_error(&reason)), StreamItem::Value)
    }

    fn skip_broken(&mut self, at: u8, reason: &str) -> StreamItem {
        self.restart();
        if !ends_skipping(at) {
            self.position = FramePosition::Skipping;
        }
        StreamItem::Broken(parse_error(reason))
    }

    fn restart(&mut self) {
        self.position = FramePosition::BetweenValues;
        self.brackets = 0;
        self.depth = 0;
        self.message.clear();
        // Frees the memory of a large message.
        self.message.shrink_to(RETAINED_BYTES);
    }
}

/// QEMU's prefix of the error, followed by the reason.
fn parse_error(reason: &str) -> String {
    format!("JSON parse error, {reason}")
}

fn unfinished_string() -> FrameStep {
    FrameStep::Invalid("a string contains a control byte or 0xff (missing quote?)".to_owned())
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

fn is_scalar(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}

/// True for bytes that end the skipping after an error. Tabs and carriage returns do not.
fn ends_skipping(byte: u8) -> bool {
    byte == b'\n' || byte == 0xff || (byte < b' ' && !is_space(byte))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Parsed values; errors are `"!"` and the text after QEMU's prefix.
    fn items(text: &[u8], piece: usize) -> Vec<Value> {
        let mut stream = JsonStream::default();
        let mut items = Vec::new();
        for mut input in text.chunks(piece) {
            while let Some(item) = stream.advance(&mut input) {
                items.push(match item {
                    StreamItem::Value(value) => value,
                    StreamItem::Broken(reason) => {
                        json!(reason.replace("JSON parse error, ", "!"))
                    }
                });
            }
        }
        items
    }

    #[track_caller]
    fn check(text: &[u8], expected: &[Value]) {
        for piece in [1, 2, 3, 7, text.len().max(1)] {
            assert_eq!(items(text, piece), expected, "in pieces of {piece}");
        }
    }

    #[test]
    fn values_may_be_separated_by_space_or_nothing() {
        check(
            br#"{"a":"}]\"{"}[1,[2]] "s"7 {}{}"#,
            &[json!({"a": "}]\"{"}), json!([1, [2]]), json!("s"), json!(7), json!({}), json!({})],
        );
        check(b"\r\n\t {\n}\r\n null\n", &[json!({}), json!(null)]);
    }

    #[test]
    fn invalid_value_affects_only_itself() {
        check(
            br#"{foo}{"a":1,}{"a" 1}tru 1"#,
            &[
                json!("!key must be a string at line 1 column 2"),
                json!("!trailing comma at line 1 column 8"),
                json!("!expected `:` at line 1 column 6"),
                json!("!EOF while parsing a value at line 1 column 3"),
            ],
        );
    }

    #[test]
    fn framing_error_skips_the_line() {
        check(
            b"} {}\n{\"a\":]} {}\n{} ' {}\n[1}\n{}",
            &[
                json!("!expecting value, not '}'"),
                json!("!expecting '}', not ']'"),
                json!({}),
                json!("!stray '''"),
                json!("!expecting ']', not '}'"),
                json!({}),
            ],
        );
        check(
            b"\"abc\n{}",
            &[json!("!a string contains a control byte or 0xff (missing quote?)"), json!({})],
        );
        check(
            b"\"abc\\\n{}",
            &[json!("!a string contains a control byte or 0xff (missing quote?)"), json!({})],
        );
    }

    #[test]
    fn byte_0xff_restarts_parsing() {
        check(b"{\"a\":[\xff{}", &[json!("!stray byte 0xff"), json!({})]);
        check(
            b"{\"a\":\"x\xff{}",
            &[json!("!a string contains a control byte or 0xff (missing quote?)"), json!({})],
        );
        check(b"# junk \x01{}", &[json!("!stray '#'"), json!({})]);
        check(
            b"{\"\xc3\xa9\":\"\xc3\"}{}",
            &[json!("!invalid unicode code point at line 1 column 8"), json!({})],
        );
    }

    #[test]
    fn depth_is_bounded() {
        let deep = |depth: usize| [b"[".repeat(depth), b"]".repeat(depth), b"\n{}".to_vec()].concat();
        let found = items(&deep(MAX_DEPTH as usize), 1000);
        assert_eq!(found.len(), 2);
        assert!(found[0].is_array());
        let error = json!("!more than 64 arrays and objects within each other");
        check(&deep(65), &[error.clone(), json!({})]);
        check(&deep(100_000), &[error, json!({})]);
    }

    #[test]
    fn memory_is_bounded_for_endless_messages() {
        let mut stream = JsonStream::default();
        let mut broken = 0;
        let mut input = &b"[\""[..];
        assert_eq!(stream.advance(&mut input), None);
        for _ in 0..100 {
            // A string without an end: 6.4 MB in total.
            let piece = vec![b'x'; 64 << 10];
            let mut input = &piece[..];
            broken += usize::from(stream.advance(&mut input).is_some());
            assert_eq!(stream.advance(&mut input), None);
            assert!(stream.message.capacity() <= 2 * MAX_MESSAGE_BYTES);
        }
        assert_eq!(broken, 1);
        let mut input = &b"\"]\n {}"[..];
        assert_eq!(stream.advance(&mut input), Some(StreamItem::Value(json!({}))));
    }
}
