//! What `block-export-add` is told of an export with a door of its own. QEMU's types have QEMU's
//! arguments; what it has not begins with `x-`, and takes the keys of the config file.

use serde_json::Value;
use settings::{Door, Fuse, Keyed, NbdDevice, Socket, Ublk, VhostUserBlk};

use crate::control::qmp::{arguments::Arguments, error::Error};

pub(super) const TYPES: [&str; 4] = ["vhost-user-blk", "fuse", "x-ublk", "x-nbd-device"];

pub(super) fn read(kind: &str, arguments: &mut Arguments) -> Result<Door, Error> {
    Ok(match kind {
        "vhost-user-blk" => Door::VhostUserBlk(machine(arguments)?),
        "fuse" => {
            let file: String = arguments.required("mountpoint")?;
            if file.is_empty() {
                return Err(Error::rule("mountpoint", "is empty; write the path of a regular file"));
            }
            Door::Fuse(with_keys(arguments, Fuse::at(file.into()))?)
        }
        "x-ublk" => {
            // Fits.
            let number = arguments.number("number", 0..=(1 << 20) - 1)?.map(|number| number as u32);
            Door::Ublk(with_keys(arguments, Ublk { number, ..Ublk::default() })?)
        }
        _ => {
            let device: Option<String> = arguments.optional("device")?;
            let device = device.as_deref().unwrap_or("auto").parse();
            let device: NbdDevice = device.map_err(|rule: String| Error::rule("device", rule))?;
            Door::NbdDevice(with_keys(arguments, device)?)
        }
    })
}

/// The keys of a door; that it is read-only is said by `writable`.
fn with_keys<K: Keyed>(arguments: &mut Arguments, mut keyed: K) -> Result<K, Error> {
    for key in K::VALUES {
        let text = match arguments.optional::<Value>(key)? {
            None => continue,
            Some(Value::String(text)) => text,
            Some(Value::Number(number)) => number.to_string(),
            Some(_) => return Err(Error::wrong_type(&arguments.name_of(key), "string or integer")),
        };
        keyed.set(key, &text).map_err(|rule| Error::rule(&arguments.name_of(key), rule))?;
    }
    for (key, flag) in keyed.flags().into_iter().filter(|(key, _)| *key != "read-only") {
        if let Some(on) = arguments.optional(key)? {
            *flag = on;
        }
    }
    Ok(keyed)
}

/// As QEMU's `BlockExportOptionsVhostUserBlk`, with one queue if nothing is said.
fn machine(arguments: &mut Arguments) -> Result<VhostUserBlk, Error> {
    let mut address = arguments.object("addr")?.ok_or_else(|| Error::missing("addr"))?;
    let kind = address.choice("type", &["unix", "fd"])?;
    let kind = kind.ok_or_else(|| Error::missing(&address.name_of("type")))?;
    let (member, scheme, empty) = match kind {
        0 => ("path", "unix", "is empty; write the socket's path"),
        _ => ("str", "fd", "is empty; write the name of a socket that was passed"),
    };
    let place: String = address.required(member)?;
    if place.is_empty() {
        return Err(Error::rule(&address.name_of(member), empty));
    }
    let socket = format!("{scheme}:{place}").parse::<Socket>();
    let socket = socket.map_err(|rule| Error::rule(&address.name_of(member), rule))?;
    address.finish()?;
    if let Some(bytes) = arguments.number("logical-block-size", 512..=4096)?
        && bytes != 512
    {
        return Err(Error::rule("logical-block-size", "is 512 here, of every disk"));
    }
    let queues = arguments.number("num-queues", 1..=256)?.unwrap_or(1);
    // From 1 to 256.
    Ok(VhostUserBlk { queues: queues as u16, ..VhostUserBlk::at(socket) })
}
