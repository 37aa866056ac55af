//! `--object` of `qemu-nbd`: secrets and TLS credentials that other options name by their ids.

use std::{io::Write as _, os::fd::IntoRawFd as _};

use anyhow::{Context as _, anyhow, bail};
use settings::keyval;

/// A passphrase is far shorter, and a pipe holds as much without a reader (pipe(7)).
const MOST_SECRET_BYTES: usize = 4096;

/// Each object with its keys, `qom-type` among them.
#[derive(Debug, Default)]
pub(super) struct Objects(Vec<(String, Vec<(String, String)>)>);

impl Objects {
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
                other => bail!(
                    "--object {text}: invalid object type: {} (there are secret, tls-creds-psk, tls-creds-x509)",
                    other.unwrap_or_default()
                ),
            };
            let unknown = pairs.iter().find(|(key, _)| {
                !["qom-type", "id"].contains(&key.as_str()) && !known.contains(&key.as_str())
            });
            if let Some((key, _)) = unknown {
                bail!("--object {text}: {key}: is not to be had (there are {})", known.join(", "));
            }
            let id = value("id")
                .with_context(|| format!("--object {text}: Parameter 'id' is missing"))?
                .to_owned();
            if objects.find(&id).is_some() {
                bail!("--object {text}: attempt to add duplicate property '{id}' to object");
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

    /// The option of `weir serve` that reads this secret.
    pub(super) fn secret(&self, id: &str) -> anyhow::Result<String> {
        let pairs = self.of_type(id, &["secret"]).with_context(|| format!("No secret with id '{id}'"))?;
        if let Some(format) = value(pairs, "format").filter(|format| *format != "raw") {
            bail!("secret {id}: format={format} is not to be had (write it raw)");
        }
        match (value(pairs, "file"), value(pairs, "data")) {
            (Some(file), None) => Ok(format!("--secret-file={file}")),
            (None, Some(data)) => Ok(format!("--secret-fd={}", descriptor(data)?)),
            (Some(_), Some(_)) => bail!("'file' and 'data' are mutually exclusive"),
            (None, None) => bail!("Either 'file' or 'data' must be provided"),
        }
    }

    /// The options of `weir serve` that require TLS with these credentials.
    pub(super) fn tls(&self, id: &str) -> anyhow::Result<Vec<String>> {
        let pairs = self.of_type(id, &["tls-creds-x509", "tls-creds-psk"]);
        let pairs =
            pairs.with_context(|| format!("Failed to get TLS creds: No TLS credentials with id '{id}'"))?;
        if value(pairs, "endpoint") != Some("server") {
            bail!(
                "Failed to get TLS creds: Expecting TLS credentials with a server endpoint (add endpoint=server)"
            );
        }
        let directory = value(pairs, "dir")
            .with_context(|| format!("TLS credentials {id}: have no dir (add dir=DIR)"))?;
        let mut words = vec!["--tls=required".to_owned()];
        if value(pairs, "qom-type") == Some("tls-creds-psk") {
            words.push(format!("--tls-psk={directory}"));
            return Ok(words);
        }
        words.push(format!("--tls-certificates={directory}"));
        match value(pairs, "verify-peer") {
            None | Some("on" | "yes" | "true" | "y") => words.push("--tls-verify-peer".to_owned()),
            Some("off" | "no" | "false" | "n") => {}
            Some(other) => bail!("TLS credentials {id}: verify-peer={other} is neither on nor off"),
        }
        Ok(words)
    }
}

/// The last value of a key.
fn value<'a>(pairs: &'a [(String, String)], key: &str) -> Option<&'a str> {
    pairs.iter().rfind(|(known, _)| known == key).map(|(_, value)| value.as_str())
}

/// A descriptor where the text can be read once; it stays open until then.
fn descriptor(text: &str) -> anyhow::Result<i32> {
    if text.len() > MOST_SECRET_BYTES {
        bail!("a secret has {} bytes; there may be {MOST_SECRET_BYTES} (put it into a file)", text.len());
    }
    let (reader, mut writer) = std::io::pipe().context("no pipe for a secret")?;
    writer.write_all(text.as_bytes()).context("a secret cannot be passed on")?;
    Ok(reader.into_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects(texts: &[&str]) -> anyhow::Result<Objects> {
        Objects::read(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
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
    fn what_cannot_be_is_refused_by_name() {
        let refused = |text: &str, expect: &str| {
            let said = objects(&[text]).unwrap_err().to_string();
            assert!(said.contains(expect), "{said}");
        };
        refused("authz-simple,id=a", "invalid object type: authz-simple");
        refused("tls-creds-x509,id=a,priority=x", "priority: is not to be had");
        refused("secret,data=x", "Parameter 'id' is missing");
        let found =
            objects(&["tls-creds-psk,id=p,dir=/k", "secret,id=s,data=x,format=base64", "secret,id=e"])
                .unwrap();
        assert!(found.tls("p").unwrap_err().to_string().contains("server endpoint"));
        assert!(found.tls("s").unwrap_err().to_string().contains("No TLS credentials with id 's'"));
        assert!(found.secret("s").unwrap_err().to_string().contains("format=base64"));
        assert!(found.secret("e").unwrap_err().to_string().contains("Either 'file' or 'data'"));
        assert!(found.secret("p").unwrap_err().to_string().contains("No secret with id 'p'"));
    }
}
