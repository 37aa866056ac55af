//! Splits a byte stream into JSON values. Values may be separated by white space or nothing.
//!
//! ```text
//!           ┌──────────────── newline, control character, 0xff ◄──┐
//!           ▼                                                     │
//!   ──► between ──► in a value ──► complete ──► json::parse      lost
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
const KEPT_BYTES: usize = 16 << 10;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item {
    Value(Value),
    Broken(String),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Between,
    Inside,
    Quoted,
    /// After a backslash.
    Escaped,
    /// In a number or word at the top level.
    Scalar,
    Lost,
}

enum Step {
    Skip,
    Take,
    Last,
    /// The value has ended before this byte.
    Ended,
    Wrong(String),
}

#[derive(Debug, Default)]
pub(crate) struct Stream {
    place: Place,
    /// Stack of open brackets, innermost in the lowest bit: 1 is an object, 0 an array.
    brackets: u64,
    depth: u32,
    message: Vec<u8>,
}

impl Stream {
    /// Consumes bytes of `input` up to the end of a value; `None` after all are consumed.
    pub(crate) fn advance(&mut self, input: &mut &[u8]) -> Option<Item> {
        while let [byte, rest @ ..] = *input {
            let byte = *byte;
            // One byte at a time: the state survives any split of the input.
            let step = self.step(byte);
            if !matches!(step, Step::Ended) {
                *input = rest;
            }
            match step {
                Step::Skip => {}
                Step::Take if self.message.len() < MAX_MESSAGE_BYTES => self.message.push(byte),
                Step::Take => {
                    let reason = format!("the message is longer than {MAX_MESSAGE_BYTES} bytes");
                    return Some(self.lose(byte, &reason));
                }
                Step::Last => {
                    self.message.push(byte);
                    return Some(self.complete());
                }
                Step::Ended => return Some(self.complete()),
                Step::Wrong(reason) => return Some(self.lose(byte, &reason)),
            }
        }
        None
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.message.len()
    }

    fn step(&mut self, byte: u8) -> Step {
        match self.place {
            Place::Lost => {
                if is_fresh_start(byte) {
                    self.place = Place::Between;
                }
                Step::Skip
            }
            Place::Between if is_space(byte) => Step::Skip,
            Place::Between | Place::Inside => self.outside_quotes(byte),
            Place::Quoted => self.in_quotes(byte),
            Place::Escaped if byte >= b' ' => {
                self.place = Place::Quoted;
                Step::Take
            }
            Place::Escaped => unfinished_string(),
            Place::Scalar if is_scalar(byte) => Step::Take,
            // The byte belongs to the next value, and is examined again.
            Place::Scalar => Step::Ended,
        }
    }

    fn outside_quotes(&mut self, byte: u8) -> Step {
        let inside = self.place == Place::Inside;
        match byte {
            b'{' | b'[' if self.depth == MAX_DEPTH => {
                Step::Wrong(format!("more than {MAX_DEPTH} arrays and objects within each other"))
            }
            b'{' | b'[' => {
                self.place = Place::Inside;
                self.depth += 1;
                // 64 bits suffice for `MAX_DEPTH` levels.
                self.brackets = self.brackets << 1 | u64::from(byte == b'{');
                Step::Take
            }
            b'}' | b']' if inside => self.close(byte),
            b'"' => {
                self.place = Place::Quoted;
                Step::Take
            }
            b',' | b':' if inside => Step::Take,
            _ if inside && (is_space(byte) || is_scalar(byte)) => Step::Take,
            _ if is_scalar(byte) => {
                self.place = Place::Scalar;
                Step::Take
            }
            b'}' | b']' | b',' | b':' => Step::Wrong(format!("expecting value, not '{}'", char::from(byte))),
            _ if byte.is_ascii_graphic() => Step::Wrong(format!("stray '{}'", char::from(byte))),
            _ => Step::Wrong(format!("stray byte 0x{byte:02x}")),
        }
    }

    fn close(&mut self, byte: u8) -> Step {
        let is_object = self.brackets & 1 == 1;
        if is_object != (byte == b'}') {
            let right = if is_object { '}' } else { ']' };
            return Step::Wrong(format!("expecting '{right}', not '{}'", char::from(byte)));
        }
        self.brackets >>= 1;
        self.depth -= 1;
        if self.depth == 0 { Step::Last } else { Step::Take }
    }

    fn in_quotes(&mut self, byte: u8) -> Step {
        match byte {
            b'"' if self.depth == 0 => Step::Last,
            b'"' => {
                self.place = Place::Inside;
                Step::Take
            }
            b'\\' => {
                self.place = Place::Escaped;
                Step::Take
            }
            // Control characters must be escaped in JSON strings (RFC 8259, section 7).
            0xff | 0..b' ' => unfinished_string(),
            _ => Step::Take,
        }
    }

    fn complete(&mut self) -> Item {
        let parsed = json::parse(&self.message);
        self.restart();
        parsed.map_or_else(|reason| Item::Broken(described(&reason)), Item::Value)
    }

    fn lose(&mut self, at: u8, reason: &str) -> Item {
        self.restart();
        if !is_fresh_start(at) {
            self.place = Place::Lost;
        }
        Item::Broken(described(reason))
    }

    fn restart(&mut self) {
        self.place = Place::Between;
        self.brackets = 0;
        self.depth = 0;
        self.message.clear();
        // Returns the memory of a large message.
        self.message.shrink_to(KEPT_BYTES);
    }
}

/// QEMU's prefix of the error, followed by the reason.
fn described(reason: &str) -> String {
    format!("JSON parse error, {reason}")
}

fn unfinished_string() -> Step {
    Step::Wrong("a string does not end".to_owned())
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

fn is_scalar(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}

/// True for bytes after which parsing resumes after an error.
fn is_fresh_start(byte: u8) -> bool {
    byte == b'\n' || byte == 0xff || (byte < b' ' && !is_space(byte))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Parsed values; errors are `"!"` and the text after QEMU's prefix.
    fn items(text: &[u8], piece: usize) -> Vec<Value> {
        let mut stream = Stream::default();
        let mut items = Vec::new();
        for mut input in text.chunks(piece) {
            while let Some(item) = stream.advance(&mut input) {
                items.push(match item {
                    Item::Value(value) => value,
                    Item::Broken(reason) => {
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
    fn values_follow_each_other_with_any_space_or_none() {
        check(
            br#"{"a":"}]\"{"}[1,[2]] "s"7 {}{}"#,
            &[json!({"a": "}]\"{"}), json!([1, [2]]), json!("s"), json!(7), json!({}), json!({})],
        );
        check(b"\r\n\t {\n}\r\n null\n", &[json!({}), json!(null)]);
    }

    #[test]
    fn a_value_that_is_wrong_inside_costs_nothing_but_itself() {
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
    fn a_broken_frame_costs_its_line() {
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
        check(b"\"abc\n{}", &[json!("!a string does not end"), json!({})]);
        check(b"\"abc\\\n{}", &[json!("!a string does not end"), json!({})]);
    }

    #[test]
    fn a_byte_that_no_text_holds_begins_afresh_wherever_it_comes() {
        check(b"{\"a\":[\xff{}", &[json!("!stray byte 0xff"), json!({})]);
        check(b"{\"a\":\"x\xff{}", &[json!("!a string does not end"), json!({})]);
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
    fn memory_is_bounded_however_long_a_message_is() {
        let mut stream = Stream::default();
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
        assert_eq!(stream.advance(&mut input), Some(Item::Value(json!({}))));
    }
}
