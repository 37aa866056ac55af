//! An export as a table of the config file: `type`, the address, and each key without its default
//! value.

use std::path::{Path, PathBuf};

use super::{ExportConfig, NbdExport};
use crate::{Address, Door, Endpoint, Literal, Socket, VhostUserBlk, addressed::AddressedKeys};

impl ExportConfig {
    /// The table, with `type` first.
    pub(super) fn table(&self) -> Literal {
        fn table<T: AddressedKeys>(kind: &str, export: &T) -> Literal {
            let kind = ("type", Literal::Text(kind.to_owned()));
            Literal::Table([kind].into_iter().chain(export.literals()).collect())
        }
        match self {
            Self::Nbd(export) => table("nbd", export),
            Self::Own(door) => match door {
                Door::VhostUserBlk(export) => table(door.kind(), export),
                Door::Ublk(export) => table(door.kind(), export),
                Door::Fuse(export) => table(door.kind(), export),
                Door::NbdDevice(export) => table(door.kind(), export),
            },
        }
    }

    /// Resolves relative paths against `directory`.
    #[must_use]
    pub fn relative_to(mut self, directory: &Path) -> Self {
        let whole = |path: &mut PathBuf| *path = directory.join(&*path);
        match &mut self {
            Self::Nbd(NbdExport { listen: Endpoint::Address(Address::Unix(path)), .. }) => whole(path),
            Self::Own(Door::VhostUserBlk(VhostUserBlk { socket: Socket::Path(path), .. })) => whole(path),
            Self::Own(Door::Fuse(fuse)) => whole(&mut fuse.file),
            // TCP addresses, passed sockets and device numbers have no path.
            Self::Nbd(_) | Self::Own(_) => {}
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_table_has_what_is_not_the_default() {
        let object = |export: &ExportConfig| Value::from(&export.table());
        let machine =
            |text: &str| object(&ExportConfig::Own(Door::VhostUserBlk(text.parse().expect("a socket"))));
        assert_eq!(machine("unix:/s"), json!({ "type": "vhost-user-blk", "listen": "unix:/s" }));
        let all = "unix:/s,queues=4,queue-size=64,serial=007,discard=off,write-cache=off,read-only,client";
        assert_eq!(
            machine(all),
            json!({
                "type": "vhost-user-blk", "listen": "unix:/s", "queues": 4, "queue-size": 64, "serial": "007",
                "discard": false, "write-cache": false, "read-only": true, "client": true,
            })
        );
        let fuse = ExportConfig::Own(Door::Fuse("f,growable".parse().expect("a file")));
        assert_eq!(
            object(&fuse.relative_to(Path::new("/d"))),
            json!({ "type": "fuse", "file": "/d/f", "growable": true })
        );
        let ublk = ExportConfig::Own(Door::Ublk("3,write-cache=off".parse().expect("a device")));
        assert_eq!(object(&ublk), json!({ "type": "ublk", "number": 3, "write-cache": false }));
        let device = ExportConfig::Own(Door::NbdDevice("auto,timeout=30".parse().expect("a device")));
        assert_eq!(object(&device), json!({ "type": "nbd-device", "device": "auto", "timeout": 30 }));
        let listen = Endpoint::Address("unix:/n".parse().expect("an address"));
        let nbd = ExportConfig::Nbd(NbdExport { listen, name: Some("a".to_owned()), read_only: true });
        let expect = json!({ "type": "nbd", "listen": "unix:/n", "name": "a", "read-only": true });
        assert_eq!(object(&nbd), expect);
    }
}
