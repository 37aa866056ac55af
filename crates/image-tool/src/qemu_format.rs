//! Sizes and JSON in the form of qemu-img, for scripts that parse it.

/// JSON in qemu-img's form: indented by four spaces.
pub(super) fn json(value: &impl serde::Serialize) -> String {
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    value.serialize(&mut serializer).expect("values in memory can be written");
    bytes.push(b'\n');
    String::from_utf8(bytes).expect("JSON is text")
}

/// Size in qemu-img's form: three digits and a unit of 1024.
pub(super) fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        ..1.0 => 3,
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    let mut number = format!("{value:.digits$}");
    if number.contains('.') {
        number.truncate(number.trim_end_matches('0').trim_end_matches('.').len());
    }
    format!("{number} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_qemu_img_writes_them() {
        let sizes = [0, 512, 999, 1000, 200_704, 3 << 30, 2_297_856, 104_857_600].map(human);
        assert_eq!(sizes, ["0 B", "512 B", "999 B", "0.977 KiB", "196 KiB", "3 GiB", "2.19 MiB", "100 MiB"]);
    }
}
