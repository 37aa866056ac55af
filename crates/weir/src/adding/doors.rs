//! Doors of a disk's own, as `weir serve` has them: what they are to `block-export-add`, and to a
//! config file.

use std::path::absolute;

use clap::Args;
use serde_json::{Map, Value, json};
use settings::{Door, Fuse, Literal, NbdDevice, Socket, Ublk, VhostUserBlk};

#[derive(Debug, Args)]
pub(super) struct DoorArgs {
    /// Serve a virtual machine at unix:PATH, over vhost-user-blk; repeatable. Behind commas:
    /// queues=N, queue-size=N, serial=TEXT, logical-block-size=N, discard=off, write-zeroes=off,
    /// write-cache=off, read-only, client (the machine listens there).
    /// NBD is then served only where --nbd says so
    #[arg(long, value_name = "unix:PATH[,…]", value_parser = settings::read::<VhostUserBlk>)]
    vhost_user_blk: Vec<VhostUserBlk>,
    /// Serve a block device of this host by ublk, as --ublk of `weir serve`; repeatable
    #[arg(long, value_name = "N[,…]", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = settings::read::<Ublk>)]
    ublk: Vec<Ublk>,
    /// Serve the disk as a file, by FUSE, as --fuse of `weir serve`; repeatable
    #[arg(long, value_name = "FILE[,…]", value_parser = settings::read::<Fuse>)]
    fuse: Vec<Fuse>,
    /// Serve a block device of the kernel's NBD client, as --nbd-device of `weir serve`;
    /// repeatable
    #[arg(long, value_name = "/dev/nbdN[,…]", value_parser = settings::read::<NbdDevice>)]
    nbd_device: Vec<NbdDevice>,
}

impl DoorArgs {
    /// Those that were named, with whole paths: the daemon may be in another directory.
    pub(super) fn all(self) -> std::io::Result<Vec<Door>> {
        let Self { vhost_user_blk, ublk, mut fuse, nbd_device } = self;
        let mut doors = Vec::new();
        for mut machine in vhost_user_blk {
            if let Socket::Path(path) = &machine.socket {
                machine.socket = Socket::Path(absolute(path)?);
            }
            doors.push(Door::VhostUserBlk(machine));
        }
        doors.extend(ublk.into_iter().map(Door::Ublk));
        for fuse in &mut fuse {
            fuse.file = absolute(&fuse.file)?;
        }
        doors.extend(fuse.into_iter().map(Door::Fuse));
        doors.extend(nbd_device.into_iter().map(Door::NbdDevice));
        Ok(doors)
    }
}

/// What `block-export-add` is told, but for id and node. QEMU's arguments have QEMU's names.
pub(crate) fn asked(door: &Door, is_writable: bool) -> Map<String, Value> {
    let kind = match door {
        Door::Ublk(_) => "x-ublk",
        Door::NbdDevice(_) => "x-nbd-device",
        Door::VhostUserBlk(_) | Door::Fuse(_) => door.kind(),
    };
    let mut asked = Map::from_iter([
        ("type".to_owned(), json!(kind)),
        ("writable".to_owned(), json!(is_writable && !door.read_only())),
    ]);
    if let Door::VhostUserBlk(machine) = door {
        asked.insert("num-queues".to_owned(), json!(machine.queues));
    }
    for (key, literal) in door.literals() {
        let value = Value::from(&literal);
        let (key, value) = match (key, door) {
            ("listen", Door::VhostUserBlk(VhostUserBlk { socket: Socket::Path(path), .. })) => {
                ("addr", json!({ "type": "unix", "path": path }))
            }
            ("listen", Door::VhostUserBlk(VhostUserBlk { socket: Socket::Passed(name), .. })) => {
                ("addr", json!({ "type": "fd", "str": name }))
            }
            ("file", _) => ("mountpoint", value),
            ("queues", Door::VhostUserBlk(_)) | ("read-only", _) => continue,
            ("write-cache", _) => ("writethrough", json!(value == false)),
            _ => (key, value),
        };
        asked.insert(key.to_owned(), value);
    }
    asked
}

/// As an export stands in a config file.
pub(super) fn written(door: &Door) -> toml_edit::InlineTable {
    let mut table = toml_edit::InlineTable::new();
    table.insert("type", door.kind().into());
    for (key, literal) in door.literals() {
        let value: toml_edit::Value = match literal {
            Literal::Flag(flag) => flag.into(),
            // Numbers of exports are small.
            Literal::Number(number) => i64::try_from(number).unwrap_or(i64::MAX).into(),
            other => other.to_string().into(),
        };
        table.insert(key, value);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_is_the_same_to_the_daemon_and_to_the_file() {
        let machine = |text: &str| Door::VhostUserBlk(text.parse().unwrap());
        let plain = machine("unix:/s");
        assert_eq!(
            Value::Object(asked(&plain, true)),
            json!({ "type": "vhost-user-blk", "writable": true, "num-queues": 16, "addr": { "type": "unix", "path": "/s" } })
        );
        assert_eq!(written(&plain).to_string(), r#"{ type = "vhost-user-blk", listen = "unix:/s" }"#);
        let all =
            machine("unix:/s,queues=4,queue-size=64,serial=7,discard=off,write-cache=off,read-only,client");
        assert_eq!(
            Value::Object(asked(&all, true)),
            json!({
                "type": "vhost-user-blk", "writable": false, "num-queues": 4, "queue-size": 64, "serial": "7",
                "addr": { "type": "unix", "path": "/s" }, "discard": false, "writethrough": true, "client": true,
            })
        );
        assert_eq!(
            written(&all).to_string(),
            r#"{ type = "vhost-user-blk", listen = "unix:/s", queues = 4, queue-size = 64, serial = "7", discard = false, write-cache = false, read-only = true, client = true }"#
        );
        let passed = machine("fd:vm1");
        assert_eq!(asked(&passed, true)["addr"], json!({ "type": "fd", "str": "vm1" }));
        let fuse = Door::Fuse("/f,growable".parse().unwrap());
        assert_eq!(
            Value::Object(asked(&fuse, false)),
            json!({ "type": "fuse", "writable": false, "mountpoint": "/f", "growable": true })
        );
        assert_eq!(written(&fuse).to_string(), r#"{ type = "fuse", file = "/f", growable = true }"#);
        let ublk = Door::Ublk("3,write-cache=off".parse().unwrap());
        assert_eq!(
            Value::Object(asked(&ublk, true)),
            json!({ "type": "x-ublk", "writable": true, "number": 3, "writethrough": true })
        );
        let device = Door::NbdDevice("auto,timeout=30".parse().unwrap());
        assert_eq!(
            Value::Object(asked(&device, true)),
            json!({ "type": "x-nbd-device", "writable": true, "device": "auto", "timeout": 30 })
        );
        assert_eq!(written(&device).to_string(), r#"{ type = "nbd-device", device = "auto", timeout = 30 }"#);
    }
}
