//! QEMU's notation `key=value,key=value`: a doubled comma in a value is one comma, and the first
//! value may omit its key. Does not interpret keys.

/// Pairs of `text`, in order; `implied` is the key of a first value without one.
///
/// # Errors
/// Fails on a part without a key.
pub fn pairs(text: &str, implied: Option<&str>) -> Result<Vec<(String, String)>, String> {
    let mut pairs = Vec::new();
    for (index, part) in parts(text).into_iter().enumerate() {
        pairs.push(match part.split_once('=') {
            Some(("", _)) => return Err("Invalid parameter ''".to_owned()),
            Some((key, value)) => (key.to_owned(), value.to_owned()),
            // Only the first part may be a value alone, as in QEMU's `-object`.
            None => match implied.filter(|_| index == 0 && !part.is_empty()) {
                Some(key) => (key.to_owned(), part),
                None if part.is_empty() => return Err("has a trailing comma".to_owned()),
                None => return Err(format!("Expected '=' after parameter '{part}'")),
            },
        });
    }
    Ok(pairs)
}

/// Splits at single commas. A trailing comma is ignored, as in QEMU.
fn parts(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let last = parts.last_mut().expect("there is one");
        match character {
            // Consumes both commas.
            ',' if characters.peek() == Some(&',') => {
                characters.next();
                last.push(',');
            }
            ',' if characters.peek().is_none() => {}
            ',' => parts.push(String::new()),
            _ => last.push(character),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubled_commas_are_one() {
        let read = |text: &str| {
            let pairs = pairs(text, Some("type")).unwrap();
            pairs.into_iter().map(|(key, value)| format!("{key}: {value}")).collect::<Vec<_>>()
        };
        assert_eq!(read("secret,id=a,data=x,,y=z"), ["type: secret", "id: a", "data: x,y=z"]);
        assert_eq!(read("type=a,b=,"), ["type: a", "b: "]);
    }

    #[test]
    fn a_part_without_a_value_is_named() {
        for (text, expect) in [
            ("a,b", "Expected '=' after parameter 'b'"),
            ("=x", "Invalid parameter ''"),
            ("a=1,b,c=2", "Expected '=' after parameter 'b'"),
            ("", "has a trailing comma"),
        ] {
            assert_eq!(pairs(text, Some("type")).unwrap_err(), expect);
        }
        assert_eq!(pairs("a", None).unwrap_err(), "Expected '=' after parameter 'a'");
    }
}
