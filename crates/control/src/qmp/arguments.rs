//! Arguments of a command, read key by key, each with its full name.
//!
//! Reading removes a value; a remaining key is an error. As in QEMU, `"100"` is no integer and `1`
//! no boolean, except in arguments that were written as `key=value` ([`keyval`]), which are all
//! text.
//!
//! [`keyval`]: super::keyval

use std::{ops::RangeInclusive, rc::Rc};

use serde_json::{Map, Value};
use settings::suggest;

use super::{descriptors::ClientDescriptors, error::QmpError, json::excerpt};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct QmpArguments {
    /// Empty for the command's own arguments, otherwise the object's name with a dot.
    prefix: String,
    members: Map<String, Value>,
    known_keys: Vec<String>,
    /// True if numbers and booleans are text.
    is_text_form: bool,
    /// Descriptors that the client passed.
    descriptors: Option<Rc<ClientDescriptors>>,
}

impl QmpArguments {
    pub(crate) fn new(members: Map<String, Value>) -> Self {
        Self { members, ..Self::default() }
    }

    /// Arguments of a command line, `key=value`.
    pub(super) fn from_text(members: Map<String, Value>) -> Self {
        Self { members, is_text_form: true, ..Self::default() }
    }

    /// Adds the descriptors that the client passed.
    pub(super) fn with_descriptors(self, passed: &Rc<ClientDescriptors>) -> Self {
        Self { descriptors: Some(Rc::clone(passed)), ..self }
    }

    /// Descriptors that the client passed; empty for arguments without a client.
    pub(super) fn descriptors(&self) -> Rc<ClientDescriptors> {
        self.descriptors.clone().unwrap_or_default()
    }

    /// All arguments as sent; `None` for those of a command line.
    pub(crate) fn sent_json(&self) -> Option<Map<String, Value>> {
        (!self.is_text_form).then(|| self.members.clone())
    }

    /// Full name of a key for errors: `limits.iops-total`.
    pub(crate) fn full_name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        // Remembered for suggestions in `finish`.
        self.known_keys.push(key.to_owned());
        self.members.remove(key)
    }

    fn take_number(&mut self, key: &str) -> Option<Value> {
        let value = self.take(key)?;
        Some(if self.is_text_form { u64::of_text(value) } else { value })
    }

    pub(crate) fn optional<T: FromArgument>(&mut self, key: &str) -> Result<Option<T>, QmpError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let value = if self.is_text_form { T::of_text(value) } else { value };
        T::read(&self.full_name(key), value).map(Some)
    }

    pub(crate) fn required<T: FromArgument>(&mut self, key: &str) -> Result<T, QmpError> {
        self.optional(key)?.ok_or_else(|| QmpError::missing(&self.full_name(key)))
    }

    /// True if the value is a string, for keys that accept a string or a number.
    pub(crate) fn is_text(&self, key: &str) -> bool {
        let text = self.members.get(key).and_then(Value::as_str);
        text.is_some_and(|text| !self.is_text_form || text.parse::<u64>().is_err())
    }

    /// Removes a value if it is `null`; returns true in that case.
    pub(crate) fn take_null(&mut self, key: &str) -> bool {
        let is_null = self.members.get(key).is_some_and(Value::is_null);
        if is_null {
            self.take(key);
        }
        is_null
    }

    pub(crate) fn number(&mut self, key: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, QmpError> {
        let Some(value) = self.take_number(key) else { return Ok(None) };
        let name = self.full_name(key);
        let number = value.as_number().filter(|number| !number.is_f64());
        let number = number.ok_or_else(|| QmpError::wrong_type(&name, "integer"))?;
        match number.as_u64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(QmpError::rule(
                &name,
                format_args!("({number}) is out of range; it is from {} to {}", range.start(), range.end()),
            )),
        }
    }

    /// Index of the argument's value in the list of accepted values.
    pub(crate) fn choice(&mut self, key: &str, choices: &[&str]) -> Result<Option<usize>, QmpError> {
        let Some(choice) = self.optional::<String>(key)? else { return Ok(None) };
        match choices.iter().position(|known| *known == choice) {
            Some(index) => Ok(Some(index)),
            None => Err(QmpError::not_accepted(&self.full_name(key), &excerpt(&choice), choices)),
        }
    }

    /// Nested object, which must be [finished](QmpArguments::finish) as well.
    pub(crate) fn object(&mut self, key: &str) -> Result<Option<Self>, QmpError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let name = self.full_name(key);
        match value {
            Value::Object(members) => Ok(Some(self.nested(name + ".", members))),
            _ => Err(QmpError::wrong_type(&name, "object")),
        }
    }

    /// Array of objects, each of which must be [finished](QmpArguments::finish) as well.
    pub(crate) fn objects(&mut self, key: &str) -> Result<Vec<Self>, QmpError> {
        let items: Vec<Value> = self.optional(key)?.unwrap_or_default();
        let name = self.full_name(key);
        let object = |(index, item)| match item {
            Value::Object(members) => Ok(self.nested(format!("{name}[{index}]."), members)),
            _ => Err(QmpError::wrong_type(&format!("{name}[{index}]"), "object")),
        };
        items.into_iter().enumerate().map(object).collect()
    }

    /// Array of names or objects, as [`QmpArguments::reference`]. Mandatory.
    pub(crate) fn references(&mut self, key: &str, expected: &str) -> Result<Vec<NodeReference>, QmpError> {
        let items: Vec<Value> = self.required(key)?;
        let name = self.full_name(key);
        let reference = |(index, item)| match item {
            Value::String(text) => Ok(NodeReference::Name(text)),
            Value::Object(members) => {
                Ok(NodeReference::Description(self.nested(format!("{name}[{index}]."), members)))
            }
            _ => Err(QmpError::wrong_type(&format!("{name}[{index}]"), expected)),
        };
        items.into_iter().enumerate().map(reference).collect()
    }

    /// Members of an object among these arguments.
    fn nested(&self, prefix: String, members: Map<String, Value>) -> Self {
        Self {
            prefix,
            members,
            known_keys: Vec::new(),
            is_text_form: self.is_text_form,
            descriptors: self.descriptors.clone(),
        }
    }

    /// Name of an object, or an object that describes it. `expected` is QMP's type for errors.
    pub(crate) fn reference(&mut self, key: &str, expected: &str) -> Result<Option<NodeReference>, QmpError> {
        match self.members.get(key) {
            Some(Value::String(_)) => Ok(self.optional(key)?.map(NodeReference::Name)),
            Some(Value::Object(_)) => Ok(self.object(key)?.map(NodeReference::Description)),
            Some(_) => Err(QmpError::wrong_type(&self.full_name(key), expected)),
            // Registers the key as known.
            None => self.optional::<String>(key).map(|_| None),
        }
    }

    #[cfg(test)]
    pub(crate) fn read_all<T>(
        value: Value,
        read: impl FnOnce(&mut Self) -> Result<T, QmpError>,
    ) -> Result<T, String> {
        let mut arguments = Self::of(value);
        let result = read(&mut arguments).and_then(|read| arguments.finish().map(|()| read));
        result.map_err(|error| error.to_string())
    }

    #[cfg(test)]
    fn of(value: Value) -> Self {
        let Value::Object(members) = value else { panic!("an object") };
        Self::new(members)
    }

    pub(crate) fn finish(self) -> Result<(), QmpError> {
        let Some(key) = self.members.keys().next() else { return Ok(()) };
        let name = excerpt(&self.full_name(key));
        let known = self.known_keys.iter().map(String::as_str);
        Err(QmpError::generic(match suggest::nearest(&excerpt(key), known) {
            Some(suggestion) => format!("Parameter '{name}' is unexpected (did you mean '{suggestion}'?)"),
            None => format!("Parameter '{name}' is unexpected"),
        }))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum NodeReference {
    Name(String),
    Description(QmpArguments),
}

pub(crate) trait FromArgument: Sized {
    /// `name` is the full name for errors.
    fn read(name: &str, value: Value) -> Result<Self, QmpError>;

    /// Converts text to this type; unconvertible text stays text.
    fn of_text(value: Value) -> Value {
        value
    }
}

impl FromArgument for String {
    fn read(name: &str, value: Value) -> Result<Self, QmpError> {
        match value {
            Value::String(text) => Ok(text),
            _ => Err(QmpError::wrong_type(name, "string")),
        }
    }
}

impl FromArgument for bool {
    fn read(name: &str, value: Value) -> Result<Self, QmpError> {
        value.as_bool().ok_or_else(|| QmpError::wrong_type(name, "boolean"))
    }

    fn of_text(value: Value) -> Value {
        // The words of QEMU's `qapi_bool_parse`.
        match value.as_str() {
            Some("on" | "yes" | "true" | "y") => Value::Bool(true),
            Some("off" | "no" | "false" | "n") => Value::Bool(false),
            _ => value,
        }
    }
}

impl FromArgument for u64 {
    fn read(name: &str, value: Value) -> Result<Self, QmpError> {
        let number = value.as_number().filter(|number| !number.is_f64());
        let number = number.ok_or_else(|| QmpError::wrong_type(name, "integer"))?;
        number.as_u64().ok_or_else(|| QmpError::rule(name, format_args!("({number}) is negative")))
    }

    fn of_text(value: Value) -> Value {
        match value.as_str().and_then(|text| text.parse::<u64>().ok()) {
            Some(number) => Value::from(number),
            None => value,
        }
    }
}

impl<T: FromArgument> FromArgument for Vec<T> {
    fn read(name: &str, value: Value) -> Result<Self, QmpError> {
        let Value::Array(items) = value else { return Err(QmpError::wrong_type(name, "array")) };
        let item = |(index, item)| T::read(&format!("{name}[{index}]"), item);
        items.into_iter().enumerate().map(item).collect()
    }

    fn of_text(value: Value) -> Value {
        match value {
            Value::Array(items) => items.into_iter().map(T::of_text).collect(),
            other => other,
        }
    }
}

impl FromArgument for Value {
    fn read(_: &str, value: Value) -> Result<Self, QmpError> {
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn refused<T: std::fmt::Debug>(result: Result<T, QmpError>, expected: &str) {
        assert_eq!(result.unwrap_err().to_string(), expected);
    }

    #[test]
    fn typed_values_are_read() {
        let mut given = QmpArguments::of(json!({"s": "x", "b": true, "n": 7, "l": ["a"], "o": {"in": 1}}));
        assert_eq!(given.required("s"), Ok("x".to_owned()));
        assert_eq!(given.required("b"), Ok(true));
        assert_eq!(given.number("n", 0..=7), Ok(Some(7)));
        assert_eq!(given.required("l"), Ok(vec!["a".to_owned()]));
        assert_eq!(given.optional::<u64>("absent"), Ok(None));
        let mut inner = given.object("o").unwrap().unwrap();
        assert_eq!(inner.required("in"), Ok(1_u64));
        inner.finish().unwrap();
        assert!(given.members.is_empty());
        given.finish().unwrap();
    }

    #[test]
    fn wrong_values_have_qemus_errors() {
        let mut given =
            QmpArguments::of(json!({"s": 5, "n": "5", "f": 1.5, "m": -1, "w": "x", "l": [1, "a"]}));
        refused(given.required::<String>("s"), "Invalid parameter type for 's', expected: string");
        refused(given.required::<u64>("n"), "Invalid parameter type for 'n', expected: integer");
        refused(given.number("f", 0..=9), "Invalid parameter type for 'f', expected: integer");
        refused(given.number("m", 0..=9), "Parameter 'm' (-1) is out of range; it is from 0 to 9");
        refused(given.choice("w", &["a", "b"]), "Parameter 'w' does not accept value 'x' (accepted: a, b)");
        refused(given.required::<Vec<u64>>("l"), "Invalid parameter type for 'l[1]', expected: integer");
        refused(given.required::<u64>("gone"), "Parameter 'gone' is missing");
    }

    #[test]
    fn text_values_are_converted() {
        let Value::Object(members) = json!({
            "s": "5", "b": "on", "n": "7", "l": ["1", "2"], "o": {"in": "off"}, "size": "8", "full": "full",
        }) else {
            panic!("an object")
        };
        let mut given = QmpArguments::from_text(members);
        assert_eq!(given.required("s"), Ok("5".to_owned()));
        assert_eq!(given.required("b"), Ok(true));
        assert_eq!(given.number("n", 0..=7), Ok(Some(7)));
        assert_eq!(given.required("l"), Ok(vec![1_u64, 2]));
        assert_eq!(given.object("o").unwrap().unwrap().required("in"), Ok(false));
        assert_eq!((given.is_text("size"), given.is_text("full")), (false, true));
        refused(given.required::<u64>("full"), "Invalid parameter type for 'full', expected: integer");
        refused(given.required::<bool>("size"), "Invalid parameter type for 'size', expected: boolean");
    }

    #[test]
    fn unexpected_key_is_named_with_its_path() {
        let mut given = QmpArguments::of(json!({"limits": {"iops-totl": 1}, "zzz": 1}));
        let mut limits = given.object("limits").unwrap().unwrap();
        limits.number("iops-total", 0..=9).unwrap();
        refused(limits.finish(), "Parameter 'limits.iops-totl' is unexpected (did you mean 'iops-total'?)");
        refused(given.finish(), "Parameter 'zzz' is unexpected");
    }
}
