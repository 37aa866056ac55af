//! Edits of the config file's text. Text outside the edited keys keeps every byte.
//!
//! Comments, order, quotes and blank lines belong to the operator. An existing setting is changed
//! in place; a new one is appended to its table. A setting that returns to its default stays, with
//! its comment; only `group`, which has no such value, is removed.
//!
//! Never checks values: the config's own reader checks the result.

use std::path::Path;

use settings::{
    ConfigKey, ConfigWithOrigins, DiskConfig, KeyLiteral, KeyTable,
    key::{KeyType, ValueError},
};
use toml_edit::{Array, Decor, DocumentMut, InlineTable, Item, Table, TableLike, Value};

use crate::client::change::{SettingName, SettingValue, SettingsChange};

/// Applies a change. Fails if the text is not TOML or has no table `[kind.name]`.
pub(super) fn with_change(
    text: &str,
    kind: &str,
    name: &str,
    change: &SettingsChange,
) -> Result<String, String> {
    let mut document = parsed(text)?;
    let table =
        document.get_mut(kind).and_then(Item::as_table_like_mut).and_then(|tables| tables.get_mut(name));
    // In an inline table, whitespace around the values is part of their decor.
    let is_inline = table.as_ref().is_some_and(|table| table.is_inline_table());
    let table = table.and_then(Item::as_table_like_mut).ok_or_else(|| {
        format!("has no [{kind}.{name}] (did the {kind} come from another file, or over QMP?)")
    })?;
    for (setting, value) in change.iter() {
        match setting_value(setting, value)? {
            Some(written) => set(table, is_inline, setting, written, *value == setting.default()),
            None => remove(table, setting.text()),
        }
    }
    with_original_newlines(text, document.to_string())
}

/// Appends a table `[kind.name]` with the given keys. Fails if it exists.
pub(crate) fn with_table<T: KeyTable>(
    text: &str,
    kind: &str,
    name: &str,
    config: &ConfigWithOrigins<T>,
) -> Result<String, String> {
    let mut document = parsed(text)?;
    let of_kind = document.entry(kind).or_insert_with(|| {
        let mut table = Table::new();
        // An implicit table: only the header [disk.NAME] is written, not [disk].
        table.set_implicit(true);
        Item::Table(table)
    });
    let is_inline = of_kind.is_inline_table();
    let of_kind = of_kind.as_table_like_mut().ok_or_else(|| format!("its {kind} is not a table"))?;
    if of_kind.contains_key(name) {
        return Err(format!("already has a [{kind}.{name}]"));
    }
    let mut table = Table::new();
    // TOML assigns every key after a table header to that table: values first.
    let (tables, values) = config.given_keys().partition::<Vec<_>, _>(|key| key.value == KeyType::Table);
    for key in values.into_iter().chain(tables) {
        if let Some(value) = written(key, config) {
            table.insert(key.name, Item::Value(value));
        }
    }
    if !text.trim().is_empty() {
        table.decor_mut().set_prefix("\n");
    }
    let item = match is_inline {
        true => {
            let mut value = table.into_inline_table().into();
            put_last(of_kind, &mut value);
            Item::Value(value)
        }
        false => Item::Table(table),
    };
    of_kind.insert(name, item);
    with_original_newlines(text, document.to_string())
}

/// The image of a disk and its format, as the file has them; `None` if it has no table
/// `[disk.name]`.
pub(super) fn image_of(text: &str, name: &str) -> Result<Option<(String, Option<String>)>, String> {
    let document = parsed(text)?;
    let table = document.get("disk").and_then(|disks| disks.get(name)).and_then(Item::as_table_like);
    let Some(table) = table else { return Ok(None) };
    let text_of = |key| table.get(key).and_then(Item::as_str).map(str::to_owned);
    let image = text_of("image").ok_or_else(|| format!("its [disk.{name}] has no image"))?;
    Ok(Some((image, text_of("format"))))
}

/// Changes the image of a disk and its format.
pub(super) fn with_image(text: &str, name: &str, image: &str, format: &str) -> Result<String, String> {
    let mut document = parsed(text)?;
    let table = document.get_mut("disk").and_then(|disks| disks.get_mut(name));
    let is_inline = table.as_ref().is_some_and(|table| table.is_inline_table());
    let table = table.and_then(Item::as_table_like_mut).ok_or_else(|| format!("has no [disk.{name}]"))?;
    for (key, value) in [("image", image), ("format", format)] {
        let mut value = Value::from(value);
        if let Some(present) = table.get_mut(key).and_then(Item::as_value_mut) {
            *value.decor_mut() = present.decor().clone();
            *present = value;
        } else {
            if is_inline {
                put_last(table, &mut value);
            }
            table.insert(key, Item::Value(value));
        }
    }
    with_original_newlines(text, document.to_string())
}

/// Removes the table `[kind.name]` and the comment directly above it. Unchanged if there is none.
pub(crate) fn without_table(text: &str, kind: &str, name: &str) -> Result<String, String> {
    let mut document = parsed(text)?;
    let of_kind = document.get_mut(kind).and_then(Item::as_table_like_mut);
    let Some(table) = of_kind.and_then(|of_kind| of_kind.remove(name)) else { return Ok(text.to_owned()) };
    let above = table.as_table().and_then(|table| table.decor().prefix()?.as_str()).unwrap_or_default();
    // A comment separated by an empty line concerns something else.
    // toml_edit keeps comments above a table as the table's prefix; removing the table would remove
    // comments about later tables as well.
    let comment = above.rfind("\n\n").map_or("", |end| &above[..=end]).to_owned();
    let position = table.as_table().and_then(Table::position);
    if comment.contains('#') {
        match position.and_then(|position| next_table(document.as_table_mut(), position)) {
            Some(next) => prepend(next.decor_mut(), &comment),
            None => document.set_trailing(comment + document.trailing().as_str().unwrap_or_default()),
        }
    }
    with_original_newlines(text, document.to_string())
}

/// The table that follows a position in the text.
fn next_table(root: &mut Table, position: isize) -> Option<&mut Table> {
    let next = positions(root).into_iter().filter(|&other| other > position).min()?;
    at_position(root, next)
}

fn positions(table: &Table) -> Vec<isize> {
    let inside = table.iter().flat_map(|(_, item)| match item {
        Item::Table(table) => positions(table),
        Item::ArrayOfTables(tables) => tables.iter().flat_map(positions).collect(),
        _ => Vec::new(),
    });
    // Implicit and dotted tables have no header in the text.
    let position = table.position().filter(|_| !table.is_implicit() && !table.is_dotted());
    position.into_iter().chain(inside).collect()
}

fn at_position(table: &mut Table, position: isize) -> Option<&mut Table> {
    if table.position() == Some(position) && !table.is_implicit() {
        return Some(table);
    }
    table.iter_mut().find_map(|(_, item)| match item {
        Item::Table(table) => at_position(table, position),
        Item::ArrayOfTables(tables) => tables.iter_mut().find_map(|table| at_position(table, position)),
        _ => None,
    })
}

fn prepend(decor: &mut Decor, text: &str) {
    let existing = decor.prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default().to_owned();
    decor.set_prefix(text.to_owned() + &existing);
}

fn parsed(text: &str) -> Result<DocumentMut, String> {
    text.parse().map_err(|error: toml_edit::TomlError| {
        let start = error.span().map_or(0, |span| span.start);
        let line = 1 + text[..start].matches('\n').count();
        format!("is not valid TOML, line {line}: {}", error.message().replace('\n', "; "))
    })
}

fn with_original_newlines(text: &str, edited: String) -> Result<String, String> {
    // toml_edit drops a byte order mark and writes \n for new lines; restore the file's convention.
    let mark = if text.starts_with('\u{feff}') && !edited.starts_with('\u{feff}') { "\u{feff}" } else { "" };
    let (all, carriage) = (text.matches('\n').count(), text.matches("\r\n").count());
    if carriage == 0 {
        return Ok(format!("{mark}{edited}"));
    }
    if carriage < all {
        return Err("mixes line ends, \\n and \\r\\n (convert them to one kind)".to_owned());
    }
    Ok(format!("{mark}{}", edited.replace("\r\n", "\n").replace('\n', "\r\n")))
}

/// TOML value of a key; `None` if it is not set.
fn written<T: KeyTable>(key: &ConfigKey<T>, config: &T) -> Option<Value> {
    Some(match key.write(config)? {
        KeyLiteral::Number(number) if key.is_size() => {
            let shown = settings::exact_size(number);
            // Sizes that have a suffix are written as strings, as an operator would write them.
            let is_suffixed = shown.ends_with(['K', 'M', 'G', 'T']);
            if is_suffixed { shown.into() } else { as_toml(&KeyLiteral::Number(number)) }
        }
        literal => as_toml(&literal),
    })
}

fn as_toml(literal: &KeyLiteral) -> Value {
    match literal {
        KeyLiteral::Flag(flag) => (*flag).into(),
        // TOML integers have 64 bits with sign; the config's reader accepts numbers in strings.
        KeyLiteral::Number(number) => {
            i64::try_from(*number).map_or_else(|_| number.to_string().into(), Value::from)
        }
        KeyLiteral::Text(text) => text.as_str().into(),
        KeyLiteral::List(values) => values.iter().map(as_toml).collect::<Array>().into(),
        KeyLiteral::Table(keys) => {
            let pairs = keys.iter().map(|(key, value)| (*key, as_toml(value)));
            pairs.collect::<InlineTable>().into()
        }
    }
}

/// TOML value of a setting; `None` for no group.
///
/// # Errors
/// If the key does not accept the value.
fn setting_value(name: SettingName, value: &SettingValue) -> Result<Option<Value>, String> {
    let text = match value {
        SettingValue::Text(text) if text.is_empty() => return Ok(None),
        SettingValue::Text(text) => text.clone(),
        SettingValue::Number(number) => number.to_string(),
    };
    let key = DiskConfig::key(name.text()).expect("a setting is a key of a disk");
    let mut config = DiskConfig::default();
    match key.read(&mut config, &text, Path::new("")) {
        Ok(()) => Ok(written(key, &config)),
        Err(ValueError::Malformed(rule) | ValueError::OutOfRange(rule)) => {
            Err(format!("{} = {text}: {rule}", key.name))
        }
    }
}

fn set(table: &mut dyn TableLike, is_inline: bool, name: SettingName, mut value: Value, is_default: bool) {
    if let Some(present) = table.get_mut(name.text()).and_then(Item::as_value_mut) {
        *value.decor_mut() = present.decor().clone();
        *present = value;
    } else if !is_default {
        if is_inline {
            put_last(table, &mut value);
        }
        table.insert(name.text(), Item::Value(value));
    }
}

/// Moves the space before the closing brace of an inline table to a new last value.
fn put_last(table: &mut dyn TableLike, value: &mut Value) {
    let last = table.iter().last().map(|(key, _)| key.to_owned());
    let last = last.and_then(|key| table.get_mut(&key)?.as_value_mut());
    if let Some(decor) = last.map(Value::decor_mut) {
        value.decor_mut().set_prefix(" ");
        value.decor_mut().set_suffix(suffix(decor));
        decor.set_suffix("");
    }
}

/// Removes a key, but not the comment lines above it, which may concern the following keys.
fn remove(table: &mut dyn TableLike, key: &str) {
    let keys: Vec<String> = table.iter().map(|(key, _)| key.to_owned()).collect();
    let Some(index) = keys.iter().position(|known| known == key) else { return };
    // Comments above a key are part of its decor and would vanish with it.
    let above = prefix(table, key);
    table.remove(key);
    if !above.contains('#') {
        return;
    }
    if let Some(mut next) = keys.get(index + 1).and_then(|next| table.key_mut(next)) {
        let existing =
            next.leaf_decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default().to_owned();
        next.leaf_decor_mut().set_prefix(above + &existing);
    } else if let Some(last) =
        index.checked_sub(1).and_then(|last| table.get_mut(&keys[last])?.as_value_mut())
    {
        // No key follows: attach the comment to the preceding value, on separate lines.
        let existing = suffix(last.decor());
        last.decor_mut().set_suffix(format!("{existing}\n{}", above.trim_end_matches('\n')));
    }
}

fn suffix(decor: &Decor) -> String {
    decor.suffix().and_then(|suffix| suffix.as_str()).unwrap_or_default().to_owned()
}

fn prefix(table: &mut dyn TableLike, key: &str) -> String {
    let key = table.key(key);
    let prefix = key.and_then(|key| key.leaf_decor().prefix()?.as_str());
    prefix.unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use settings::Origin;

    use super::*;

    const FILE: &str = "\
# what we serve
[daemon]
nbd = \"unix:/run/weir.sock\"

[group.gold]   # the paying ones
iops-total   =  6000   # as sold
# burst
iops-total-max = 12000

[disk.vm1]
image = \"vm1.raw\"
# moved on Tuesday
group = 'gold' # for now
bps-read = \"10M\"

# the last
[disk.\"a b\"]
image = \"x\"
# why
group = \"gold\"

# the end
";

    fn edit(kind: &str, name: &str, settings: &str) -> Result<String, String> {
        let mut change = SettingsChange::default();
        for item in settings.split_whitespace() {
            let (name, value) = item.split_once('=').unwrap();
            let name = SettingName::find(name).unwrap();
            change.set(name, name.read(value).unwrap());
        }
        with_change(FILE, kind, name, &change)
    }

    #[track_caller]
    fn check(kind: &str, name: &str, settings: &str, old: &str, new: &str) {
        assert_eq!(FILE.matches(old).count(), 1, "{old:?} is one place");
        assert_eq!(edit(kind, name, settings).unwrap(), FILE.replace(old, new), "{settings}");
    }

    #[test]
    fn a_value_changes_in_its_place() {
        check("group", "gold", "iops-total=7000", "iops-total   =  6000   #", "iops-total   =  7000   #");
        check("group", "gold", "iops-total-max=0", "iops-total-max = 12000", "iops-total-max = 0");
        check("disk", "vm1", "bps-read=20M", "\"10M\"", "\"20M\"");
        check("disk", "vm1", "bps-read=1000", "\"10M\"", "1000");
        check("disk", "vm1", "group=silver", "'gold' # for now", "\"silver\" # for now");
    }

    #[test]
    fn a_new_setting_follows_the_last_of_its_table() {
        let last = "iops-total-max = 12000\n";
        let more = "iops-total-max = 12000\nwatermark = 90\nbps-total = \"1G\"\n";
        check("group", "gold", "watermark=90 bps-total=1G", last, more);
    }

    #[test]
    fn default_is_not_written_for_an_absent_key() {
        let defaults = "iops-total=0 weight=100 iops-read-max-length=1 prefetch=auto prefetch-memory=4M";
        assert_eq!(edit("disk", "vm1", defaults).unwrap(), FILE);
    }

    #[test]
    fn leaving_a_group_keeps_the_comments_above() {
        check(
            "disk",
            "vm1",
            "group=",
            "# moved on Tuesday\ngroup = 'gold' # for now\n",
            "# moved on Tuesday\n",
        );
        check("disk", "a b", "group=", "# why\ngroup = \"gold\"\n", "# why\n");
    }

    #[test]
    fn tables_may_be_written_in_any_way() {
        let number = |name: &str| {
            let name = SettingName::find(name).unwrap();
            let mut change = SettingsChange::default();
            change.set(name, SettingValue::Number(5));
            change
        };
        let check = |before: &str, after: &str| {
            assert_eq!(with_change(before, "disk", "a", &number("iops-total")).as_deref(), Ok(after));
        };
        check("disk.a.image = \"x\"\n", "disk.a.image = \"x\"\ndisk.a.iops-total = 5\n");
        check("disk = { a = { image = \"x\" } }\n", "disk = { a = { image = \"x\", iops-total = 5 } }\n");
        check("[disk]\na.image = \"x\"\n", "[disk]\na.image = \"x\"\na.iops-total = 5\n");
        check("[disk.a]\r\nimage = \"x\"\r\n", "[disk.a]\r\nimage = \"x\"\r\niops-total = 5\r\n");
        check("\u{feff}[disk.a]\nimage = \"x\"\n", "\u{feff}[disk.a]\nimage = \"x\"\niops-total = 5\n");
        let mixed = with_change("[disk.a]\r\nimage = \"x\"\n", "disk", "a", &number("iops-total"));
        assert_eq!(mixed.unwrap_err(), "mixes line ends, \\n and \\r\\n (convert them to one kind)");
    }

    #[test]
    fn added_table_follows_its_kind() {
        let disk = |image: &str| {
            let mut disk = ConfigWithOrigins::new(DiskConfig::default(), Origin::new("new"));
            let key = DiskConfig::key("image").unwrap();
            disk.set(key, image, Path::new(""), Origin::new("image")).unwrap();
            disk
        };
        let new = "\n[disk.new]\nimage = \"y\"\n";
        let after = with_table(FILE, "disk", "new", &disk("y")).unwrap();
        assert_eq!(after, FILE.replace("\n# the end", &format!("{new}\n# the end")));
        // Inserted between groups and disks.
        let after = with_table(FILE, "group", "new", &disk("y")).unwrap();
        assert_eq!(after, FILE.replace("\n[disk.vm1]", "\n[group.new]\nimage = \"y\"\n\n[disk.vm1]"));
        let check = |before: &str, expect: &str| {
            assert_eq!(with_table(before, "disk", "new", &disk("y")).as_deref(), Ok(expect));
        };
        check("", "[disk.new]\nimage = \"y\"\n");
        check("[daemon]\nworkers = 1\n", &format!("[daemon]\nworkers = 1\n{new}"));
        check(
            "disk = { a = { image = \"x\" } }\n",
            "disk = { a = { image = \"x\" }, new = { image = \"y\" } }\n",
        );
        assert_eq!(with_table(FILE, "disk", "vm1", &disk("y")).unwrap_err(), "already has a [disk.vm1]");
    }

    #[test]
    fn removed_table_takes_its_comment() {
        let (start, rest) = FILE.split_once("[disk.vm1]").unwrap();
        let end = rest.find("# the last").unwrap();
        assert_eq!(without_table(FILE, "disk", "vm1").unwrap(), format!("{start}{}", &rest[end..]));
        let without = without_table(FILE, "disk", "a b").unwrap();
        assert!(without.ends_with("bps-read = \"10M\"\n\n# the end\n"), "{without}");
        // A comment followed by an empty line concerns all tables below it.
        let text = "# tenants\n\n# one\n[disk.a]\nimage = \"x\"\n\n# two\n[disk.b]\nimage = \"x\"\n";
        let expect = "# tenants\n\n# two\n[disk.b]\nimage = \"x\"\n";
        assert_eq!(without_table(text, "disk", "a").unwrap(), expect);
        assert_eq!(without_table(FILE, "disk", "vm9").as_deref(), Ok(FILE), "it came over QMP");
    }

    #[test]
    fn missing_tables_are_errors() {
        let message = edit("disk", "vm9", "iops-total=1").unwrap_err();
        assert_eq!(message, "has no [disk.vm9] (did the disk come from another file, or over QMP?)");
        assert!(
            with_change("[disk", "disk", "a", &SettingsChange::default())
                .unwrap_err()
                .starts_with("is not valid TOML")
        );
    }
}
