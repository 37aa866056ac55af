//! An export as a table of the config file: `type`, the address, and each key without its default
//! value.

use std::path::{Path, PathBuf};

use super::{ExportConfig, NbdExportConfig};
use crate::{
    ExportTarget, KeyLiteral, ListenAddress, ListenEndpoint, VhostUserBlkConfig, VhostUserSocket,
    option_syntax::AddressedConfig,
};

impl ExportConfig {
    /// The table, with `type` first.
    pub(super) fn table(&self) -> KeyLiteral {
        fn table<T: AddressedConfig>(kind: &str, export: &T) -> KeyLiteral {
            let kind = ("type", KeyLiteral::Text(kind.to_owned()));
            KeyLiteral::Table([kind].into_iter().chain(export.literals()).collect())
        }
        match self {
            Self::Nbd(export) => table("nbd", export),
            Self::Target(target) => match target {
                ExportTarget::VhostUserBlk(export) => table(target.type_name(), export),
                ExportTarget::Ublk(export) => table(target.type_name(), export),
                ExportTarget::Fuse(export) => table(target.type_name(), export),
                ExportTarget::NbdDevice(export) => table(target.type_name(), export),
            },
        }
    }

    /// Resolves relative paths against `directory`.
    #[must_use]
    pub fn relative_to(mut self, directory: &Path) -> Self {
        let make_absolute = |path: &mut PathBuf| *path = directory.join(&*path);
        match &mut self {
            Self::Nbd(NbdExportConfig {
                listen: ListenEndpoint::Address(ListenAddress::Unix(path)), ..
            }) => make_absolute(path),
            Self::Target(ExportTarget::VhostUserBlk(VhostUserBlkConfig {
                socket: VhostUserSocket::Path(path),
                ..
            })) => make_absolute(path),
            Self::Target(ExportTarget::Fuse(fuse)) => make_absolute(&mut fuse.file),
            // TCP addresses, passed sockets and device numbers have no path.
            Self::Nbd(_) | Self::Target(_) => {}
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn tables_omit_default_values() {
        let object = |export: &ExportConfig| Value::from(&export.table());
        let machine = |text: &str| {
            object(&ExportConfig::Target(ExportTarget::VhostUserBlk(text.parse().expect("a socket"))))
        };
        assert_eq!(machine("unix:/s"), json!({ "type": "vhost-user-blk", "listen": "unix:/s" }));
        let all = "unix:/s,queues=4,queue-size=64,serial=007,discard=off,write-cache=off,read-only,client";
        assert_eq!(
            machine(all),
            json!({
                "type": "vhost-user-blk", "listen": "unix:/s", "queues": 4, "queue-size": 64, "serial": "007",
                "discard": false, "write-cache": false, "read-only": true, "client": true,
            })
        );
        let fuse = ExportConfig::Target(ExportTarget::Fuse("f,growable".parse().expect("a file")));
        assert_eq!(
            object(&fuse.relative_to(Path::new("/d"))),
            json!({ "type": "fuse", "file": "/d/f", "growable": true })
        );
        let ublk = ExportConfig::Target(ExportTarget::Ublk("3,write-cache=off".parse().expect("a device")));
        assert_eq!(object(&ublk), json!({ "type": "ublk", "number": 3, "write-cache": false }));
        let device =
            ExportConfig::Target(ExportTarget::NbdDevice("auto,timeout=30".parse().expect("a device")));
        assert_eq!(object(&device), json!({ "type": "nbd-device", "device": "auto", "timeout": 30 }));
        let listen = ListenEndpoint::Address("unix:/n".parse().expect("an address"));
        let nbd = ExportConfig::Nbd(NbdExportConfig { listen, name: Some("a".to_owned()), read_only: true });
        let expect = json!({ "type": "nbd", "listen": "unix:/n", "name": "a", "read-only": true });
        assert_eq!(object(&nbd), expect);
    }
}
