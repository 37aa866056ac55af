//! `--list`: the exports of another server, in the format of qemu-nbd.

use std::fmt::Write as _;

use anyhow::{Context as _, bail};
use console::{CommandFailure, on_reactor, print};
use export::nbd::client::{ListedExport, NbdEndpoint, list};
use policy::time::Duration;
use reactor::sanitize::sanitize;

use super::arguments::QemuNbdArgs;

/// Deadline, equal to that of a client's handshake.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Names of the NBD specification's transmission flags by bit number.
const FLAGS: [(u32, &str); 11] = [
    (1, "readonly"),
    (2, "flush"),
    (3, "fua"),
    (4, "rotational"),
    (5, "trim"),
    (6, "zeroes"),
    (7, "df"),
    (8, "multi"),
    (9, "resize"),
    (10, "cache"),
    (11, "fast-zero"),
];

pub(super) fn run(arguments: &QemuNbdArgs) -> Result<(), CommandFailure> {
    let endpoint = endpoint(arguments)?;
    let name = match &endpoint {
        NbdEndpoint::Unix(path) => path.display().to_string(),
        NbdEndpoint::Tcp { host, port } => format!("{host}:{port}"),
    };
    let exports = on_reactor(async move {
        let listed = list(&endpoint, TIMEOUT).await;
        Ok(listed.with_context(|| format!("Failed to connect to '{name}'"))?)
    })?;
    Ok(print(&format_exports(&exports))?)
}

fn endpoint(arguments: &QemuNbdArgs) -> anyhow::Result<NbdEndpoint> {
    if !arguments.file.is_empty() {
        bail!("List mode is incompatible with a file name");
    }
    if arguments.tls_creds.is_some() {
        bail!("--tls-creds: not supported with --list (use `nbdinfo --list`)");
    }
    // Same rule and message as qemu-nbd.
    let of_an_export = arguments.export_name.is_some()
        || arguments.description.is_some()
        || arguments.offset.is_some()
        || !arguments.bitmap.is_empty()
        || arguments.load_snapshot.is_some()
        || arguments.snapshot
        || arguments.read_only
        || arguments.fork;
    if of_an_export {
        bail!("List mode is incompatible with per-device settings");
    }
    match &arguments.socket {
        Some(path) => Ok(NbdEndpoint::Unix(path.into())),
        None => {
            let port = arguments.port.as_deref().unwrap_or("10809");
            let port = port.parse().with_context(|| format!("{port}: is not a port number"))?;
            Ok(NbdEndpoint::Tcp {
                host: arguments.bind.clone().unwrap_or_else(|| "0.0.0.0".to_owned()),
                port,
            })
        }
    }
}

fn format_exports(exports: &[ListedExport]) -> String {
    let mut text = format!("exports available: {}\n", exports.len());
    // Strings of an untrusted server must not reach a terminal with control characters.
    for export in exports {
        let _ = writeln!(text, " export: '{}'", sanitize(&export.name));
        if !export.description.is_empty() {
            let _ = writeln!(text, "  description: {}", sanitize(&export.description));
        }
        let _ = writeln!(text, "  size:  {}", export.size_bytes);
        let names = FLAGS.iter().filter(|(bit, _)| export.flags >> bit & 1 == 1).map(|(_, name)| *name);
        let names: Vec<_> = names.collect();
        let _ = writeln!(text, "  flags: 0x{:x} ( {} )", export.flags, names.join(" "));
        if let Some([minimum, preferred, maximum]) = export.block_sizes {
            let _ =
                write!(text, "  min block: {minimum}\n  opt block: {preferred}\n  max block: {maximum}\n");
        }
        if !export.contexts.is_empty() {
            let _ = writeln!(text, "  available meta contexts: {}", export.contexts.len());
            for context in &export.contexts {
                let _ = writeln!(text, "   {}", sanitize(context));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_printed_like_qemu_nbd() {
        let export = ListedExport {
            name: "a b".to_owned(),
            description: "de\u{1b}".to_owned(),
            size_bytes: 1_048_576,
            flags: 0x58f,
            block_sizes: Some([1, 4096, 33_554_432]),
            contexts: vec!["base:allocation".to_owned()],
        };
        let expect = "exports available: 1\n export: 'a b'\n  description: de?\n  size:  \
                      1048576\n  flags: 0x58f ( readonly flush fua df multi cache )\n  min block: \
                      1\n  opt block: 4096\n  max block: 33554432\n  available meta contexts: \
                      1\n   base:allocation\n";
        assert_eq!(format_exports(&[export]), expect);
    }
}
