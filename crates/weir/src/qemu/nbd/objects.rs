//! `--object` of `qemu-nbd`: secrets, TLS credentials and client names, which other options refer
//! to by id.

use std::{io::Write as _, os::fd::IntoRawFd as _};

use anyhow::{Context as _, anyhow, bail};
use settings::keyval;

/// Longest secret: a passphrase is far shorter, and a pipe buffers this much without a reader
/// (pipe(7)).
const MAX_SECRET_BYTES: usize = 4096;

/// Objects by id, each with its keys including `qom-type`.
#[derive(Debug, Default)]
pub(super) struct QemuObjects(Vec<(String, Vec<(String, String)>)>);

impl QemuObjects {
    pub(super) fn read(texts: &[String]) -> anyhow::Result<Self> {
        let mut objects = Self::default();
        for text in texts {
            let wrong = |rule: String| anyhow!("--object {text}: {rule}");
            let pairs = keyval::pairs(text, Some("qom-type")).map_err(wrong)?;
            let value = |key: &str| value(&pairs, key);
            let known: &[&str] = match value("qom-type") {
                Some("secret") => &["data", "file", "format"],
                Some("tls-creds-x509") => &["dir", "endpoint", "verify-peer", "sanity-check"],
                Some("tls-creds-psk") => &["dir", "endpoint", "sanity-check"],
                Some("authz-simple") => &["identity"],
                Some("authz-list") => &["policy", "rules"],
                other => bail!(
                    "--object {text}: invalid object type: {} (valid: authz-list, authz-simple, \
                     secret, tls-creds-psk, tls-creds-x509)",
                    other.unwrap_or_default()
                ),
            };
            let unknown = pairs.iter().find(|(key, _)| {
                // Rules are a list: `rules.0.match`, `rules.0.policy` and so on.
                let key = if key.starts_with("rules.") { "rules" } else { key };
                !["qom-type", "id"].contains(&key) && !known.contains(&key)
            });
            if let Some((key, _)) = unknown {
                bail!("--object {text}: {key}: not supported (valid: {})", known.join(", "));
            }
            let id = value("id")
                .with_context(|| format!("--object {text}: Parameter 'id' is missing"))?
                .to_owned();
            if objects.find(&id).is_some() {
                bail!("--object {text}: attempt to add duplicate property '{id}' to object");
            }
            let is_secret = value("qom-type") == Some("secret");
            match (value("file"), value("data")) {
                (Some(_), Some(_)) if is_secret => {
                    bail!("--object {text}: 'file' and 'data' are mutually exclusive")
                }
                (None, None) if is_secret => {
                    bail!("--object {text}: Either 'file' or 'data' must be provided")
                }
                _ => {}
            }
            objects.0.push((id, pairs));
        }
        Ok(objects)
    }

    fn find(&self, id: &str) -> Option<&[(String, String)]> {
        self.0.iter().find(|(known, _)| known == id).map(|(_, pairs)| &**pairs)
    }

    fn of_type(&self, id: &str, types: &[&str]) -> Option<&[(String, String)]> {
        let pairs = self.find(id)?;
        value(pairs, "qom-type").is_some_and(|kind| types.contains(&kind)).then_some(pairs)
    }

    /// Option of `weir serve` that reads this secret.
    pub(super) fn secret(&self, id: &str) -> anyhow::Result<String> {
        let pairs = self.of_type(id, &["secret"]).with_context(|| format!("No secret with id '{id}'"))?;
        if let Some(format) = value(pairs, "format").filter(|format| *format != "raw") {
            bail!("secret {id}: format={format} is not supported (use format=raw)");
        }
        // `read` has checked that exactly one of them is given.
        Ok(match value(pairs, "file") {
            Some(file) => format!("--secret-file={file}"),
            None => format!("--secret-fd={}", descriptor(value(pairs, "data").unwrap_or_default())?),
        })
    }

    /// Options of `weir serve` that allow clients with these names.
    pub(super) fn names(&self, id: &str) -> anyhow::Result<Vec<String>> {
        let pairs = self.of_type(id, &["authz-simple", "authz-list"]);
        let pairs = pairs.with_context(|| format!("No authorization object with id '{id}'"))?;
        let of_object = || format!("--object {id}");
        let option = |name: &str| format!("--tls-authz={name}");
        if value(pairs, "qom-type") == Some("authz-simple") {
            let name = value(pairs, "identity").context("Parameter 'identity' is missing");
            return Ok(vec![option(name.and_then(exact).with_context(of_object)?)]);
        }
        // weir's names are a list of allowed clients, so only the default policy deny can be
        // expressed.
        if let Some(policy) = value(pairs, "policy").filter(|policy| *policy != "deny") {
            bail!("--object {id}: policy={policy} is not supported (leave --tls-authz out)");
        }
        let rules = (0..).map(|number| format!("rules.{number}"));
        let is_present = |rule: &String| pairs.iter().any(|(key, _)| key.starts_with(&format!("{rule}.")));
        let names: Vec<_> = rules
            .take_while(is_present)
            .map(|rule| pattern(pairs, &rule).map(option))
            .collect::<anyhow::Result<_>>()
            .with_context(of_object)?;
        if names.is_empty() {
            bail!(
                "--object {id}: has no rules, so no client could connect (add \
                 rules.0.match=NAME,rules.0.policy=allow)"
            );
        }
        Ok(names)
    }

    /// Options of `weir serve` that require TLS with these credentials.
    pub(super) fn tls(&self, id: &str) -> anyhow::Result<Vec<String>> {
        let pairs = self.of_type(id, &["tls-creds-x509", "tls-creds-psk"]);
        let pairs =
            pairs.with_context(|| format!("Failed to get TLS creds: No TLS credentials with id '{id}'"))?;
        if value(pairs, "endpoint") != Some("server") {
            bail!(
                "Failed to get TLS creds: Expecting TLS credentials with a server endpoint (add \
                 endpoint=server)"
            );
        }
        let directory = value(pairs, "dir")
            .with_context(|| format!("TLS credentials {id}: dir is missing (add dir=DIR)"))?;
        let mut options = vec!["--tls=required".to_owned()];
        if value(pairs, "qom-type") == Some("tls-creds-psk") {
            options.push(format!("--tls-psk={directory}"));
            return Ok(options);
        }
        options.push(format!("--tls-certificates={directory}"));
        match value(pairs, "verify-peer") {
            // QEMU verifies clients by default (qemu(1), tls-creds-x509).
            None | Some("on" | "yes" | "true" | "y") => options.push("--tls-verify-peer".to_owned()),
            Some("off" | "no" | "false" | "n") => {}
            Some(other) => bail!("TLS credentials {id}: verify-peer={other} is neither on nor off"),
        }
        Ok(options)
    }
}

/// Name pattern of an authz-list rule. Only rules that allow can be translated.
fn pattern<'a>(pairs: &'a [(String, String)], prefix: &str) -> anyhow::Result<&'a str> {
    let key = |name: &str| value(pairs, &format!("{prefix}.{name}"));
    let name = key("match").with_context(|| format!("Parameter '{prefix}.match' is missing"))?;
    if key("policy") != Some("allow") {
        bail!("{prefix}.policy: only allow is supported (`weir serve --object` supports the others)");
    }
    match key("format") {
        Some("glob") => Ok(name),
        None | Some("exact") => exact(name),
        Some(other) => bail!("{prefix}.format={other} is neither exact nor glob"),
    }
}

/// A name without wildcards.
fn exact(name: &str) -> anyhow::Result<&str> {
    match name.contains(['*', '?']) {
        true => {
            bail!("{name}: an exact name with * or ? is not supported (`weir serve --object` supports it)")
        }
        false => Ok(name),
    }
}

/// Last value of a key.
fn value<'a>(pairs: &'a [(String, String)], key: &str) -> Option<&'a str> {
    pairs.iter().rfind(|(known, _)| known == key).map(|(_, value)| value.as_str())
}

/// Descriptor from which the text can be read once. Stays open for the server.
fn descriptor(text: &str) -> anyhow::Result<i32> {
    if text.len() > MAX_SECRET_BYTES {
        bail!("a secret has {} bytes; the limit is {MAX_SECRET_BYTES} (put it in a file)", text.len());
    }
    // Not an option's value: other users could read it from the process list.
    let (reader, mut writer) = std::io::pipe().context("cannot create a pipe for a secret")?;
    writer.write_all(text.as_bytes()).context("cannot pass a secret to the server")?;
    Ok(reader.into_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects(texts: &[&str]) -> anyhow::Result<QemuObjects> {
        QemuObjects::read(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn objects_become_options() {
        let objects = objects(&[
            "secret,id=key,file=/a,,b",
            "tls-creds-x509,id=x,endpoint=server,dir=/t",
            "qom-type=tls-creds-x509,id=open,endpoint=server,dir=/t,verify-peer=no",
            "tls-creds-psk,id=p,endpoint=server,dir=/k",
        ])
        .unwrap();
        assert_eq!(objects.secret("key").unwrap(), "--secret-file=/a,b");
        let tls = |id: &str| objects.tls(id).unwrap().join(" ");
        assert_eq!(tls("x"), "--tls=required --tls-certificates=/t --tls-verify-peer");
        assert_eq!(tls("open"), "--tls=required --tls-certificates=/t");
        assert_eq!(tls("p"), "--tls=required --tls-psk=/k");
    }

    #[test]
    fn names_become_patterns() {
        let names = |text: &str| {
            let names = objects(&[text]).unwrap().names("a").map(|options| options.join(" "));
            names.map_err(|error| format!("{error:#}"))
        };
        assert_eq!(names("authz-simple,id=a,identity=CN=x,,O=y").unwrap(), "--tls-authz=CN=x,O=y");
        let rules = "rules.0.match=CN=x*,rules.0.policy=allow,rules.0.format=glob,rules.1.match=bob,rules.1.policy=allow";
        let read = names(&format!("authz-list,id=a,policy=deny,{rules}"));
        assert_eq!(read.unwrap(), "--tls-authz=CN=x* --tls-authz=bob");
        for (text, expect) in [
            ("authz-simple,id=a", "--object a: Parameter 'identity' is missing"),
            ("authz-simple,id=a,identity=x*", "an exact name with * or ?"),
            ("authz-list,id=a,policy=allow", "policy=allow is not supported"),
            ("authz-list,id=a", "has no rules"),
            ("authz-list,id=a,rules.0.match=x,rules.0.policy=deny", "rules.0.policy: only allow"),
            ("secret,id=a,data=x", "No authorization object with id 'a'"),
        ] {
            let message = names(text).unwrap_err();
            assert!(message.contains(expect), "{message}");
        }
    }

    #[test]
    fn unsupported_objects_are_rejected_by_name() {
        let refused = |text: &str, expect: &str| {
            let message = objects(&[text]).unwrap_err().to_string();
            assert!(message.contains(expect), "{message}");
        };
        refused("authz-pam,id=a", "invalid object type: authz-pam");
        refused("tls-creds-x509,id=a,priority=x", "priority: not supported");
        refused("secret,data=x", "Parameter 'id' is missing");
        refused("secret,id=e", "Either 'file' or 'data'");
        refused("secret,id=e,file=x,data=y", "mutually exclusive");
        let found = objects(&["tls-creds-psk,id=p,dir=/k", "secret,id=s,data=x,format=base64"]).unwrap();
        assert!(found.tls("p").unwrap_err().to_string().contains("server endpoint"));
        assert!(found.tls("s").unwrap_err().to_string().contains("No TLS credentials with id 's'"));
        assert!(found.secret("s").unwrap_err().to_string().contains("format=base64"));
        assert!(found.secret("p").unwrap_err().to_string().contains("No secret with id 'p'"));
    }
}
