//! Driver `nbd` of `blockdev-add`: a disk on another server.
//!
//! ```text
//!   {"driver": "nbd", "server": {"type": "inet", "host": "h", "port": "10809"}, "export": "vm1"}
//!      ──►  nbd://h:10809/vm1
//! ```
//!
//! The caller reads QEMU's `reconnect-delay` and `open-timeout`. TLS credentials, which QEMU takes
//! from an object, are part of a URI here, `x-weir-uri`. Never connects.
//!
//! Source: `BlockdevOptionsNbd` of QEMU's `qapi/block-core.json`.

use nbd::uri;

use crate::qmp::{arguments::QmpArguments, error::QmpError};

/// URI of the export.
pub(super) fn read_uri(arguments: &mut QmpArguments) -> Result<String, QmpError> {
    for (key, rule) in [
        ("tls-creds", "is part of 'x-weir-uri' here (nbds://HOST/EXPORT?tls-certificates=DIR)"),
        ("tls-hostname", "is part of 'x-weir-uri' here (nbds://HOST/EXPORT?tls-hostname=NAME)"),
        ("x-dirty-bitmap", "is not supported; only base:allocation is requested"),
    ] {
        if arguments.optional::<String>(key)?.is_some() {
            return Err(QmpError::rule(&arguments.full_name(key), rule));
        }
    }
    let export: Option<String> = arguments.optional("export")?;
    let server = arguments.object("server")?;
    let Some(mut server) = server else {
        let uri: Option<String> = arguments.optional("x-weir-uri")?;
        if export.is_some() && uri.is_some() {
            return Err(QmpError::rule("export", "is in 'x-weir-uri' already (give one)"));
        }
        return uri.ok_or_else(|| QmpError::missing(&arguments.full_name("server")));
    };
    let export = export.unwrap_or_default();
    let server_uri = match server.choice("type", &["inet", "unix"])? {
        Some(0) => {
            let host: String = server.required("host")?;
            let port: String = server.required("port")?;
            uri::inet_uri(&host, &port, &export)
        }
        Some(_) => uri::unix_uri(&server.required::<String>("path")?, &export),
        None => return Err(QmpError::missing(&server.full_name("type"))),
    };
    server.finish()?;
    Ok(server_uri)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: Value) -> Result<String, String> {
        QmpArguments::read_all(value, read_uri)
    }

    #[test]
    fn qemus_arguments_become_a_uri() {
        let inet = json!({"server": {"type": "inet", "host": "::1", "port": "7"}, "export": "a b"});
        assert_eq!(read(inet), Ok("nbd://[::1]:7/a%20b".to_owned()));
        let unix = json!({"server": {"type": "unix", "path": "/run/s&1"}});
        assert_eq!(read(unix), Ok("nbd+unix:///?socket=/run/s%261".to_owned()));
        assert_eq!(read(json!({"x-weir-uri": "nbds://h/x"})), Ok("nbds://h/x".to_owned()));
    }

    #[test]
    fn missing_or_unsupported_arguments_are_named() {
        for (value, expected) in [
            (json!({}), "Parameter 'server' is missing"),
            (json!({"server": {"host": "h"}}), "Parameter 'server.type' is missing"),
            (json!({"server": {"type": "unix"}}), "Parameter 'server.path' is missing"),
            (json!({"tls-creds": "t"}), "Parameter 'tls-creds' is part of 'x-weir-uri' here"),
            (json!({"x-weir-uri": "nbd://h/x", "export": "y"}), "Parameter 'export' is in 'x-weir-uri'"),
        ] {
            let refused = read(value).unwrap_err();
            assert!(refused.starts_with(expected), "{refused}");
        }
    }
}
