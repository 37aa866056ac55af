//! A watch: a streamed answer of etcd, one JSON object per line.

use std::time::Duration;

use anyhow::anyhow;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::{
    EtcdError,
    connection::EtcdConnection,
    message::{EtcdEvent, KeyRange},
};

/// Maximum length of a line: the changes of one revision, or all since an older one.
const MAX_LINE_BYTES: usize = 64 << 20;

#[derive(Debug)]
pub(crate) struct EtcdWatch {
    /// Kept open: the stream ends with it.
    _connection: EtcdConnection,
    body: Incoming,
    rest: Vec<u8>,
}

impl EtcdWatch {
    /// Watches one range: for several ranges in one request the gateway may begin its answer after
    /// the first, and Go's HTTP server then discards the unread rest of the request.
    ///
    /// # Errors
    /// Fails if the member does not confirm the watch in time.
    pub(super) async fn open(
        mut connection: EtcdConnection,
        range: &KeyRange,
        from: i64,
        token: Option<&str>,
        timeout: Duration,
    ) -> Result<Self, EtcdError> {
        let mut create = range.body();
        create["start_revision"] = json!(from.to_string());
        let request = json!({ "create_request": create }).to_string().into_bytes();
        let opening = async {
            let response = connection.send_request("/v3/watch", request, token).await?;
            if !response.status().is_success() {
                return Err(EtcdError::Unreachable(anyhow!(
                    "etcd: the watch was rejected: {}",
                    response.status()
                )));
            }
            let mut watch = Self { _connection: connection, body: response.into_body(), rest: Vec::new() };
            let first = watch.line().await?;
            // A missing right is reported in the first line.
            parse_events(&first)?;
            match is_created(&first) {
                true => Ok(watch),
                false => Err(EtcdError::Unreachable(anyhow!("etcd: the watch was not confirmed"))),
            }
        };
        let result = tokio::time::timeout(timeout, opening).await;
        result.map_err(|_| EtcdError::Unreachable(anyhow!("etcd: the watch was not confirmed in time")))?
    }

    /// Next events, in order. May be empty.
    ///
    /// # Errors
    /// Fails at the end of the watch. The caller then reads everything anew.
    pub(crate) async fn next(&mut self) -> Result<Vec<EtcdEvent>, EtcdError> {
        parse_events(&self.line().await?)
    }

    async fn line(&mut self) -> Result<Vec<u8>, EtcdError> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                return Ok(self.rest.drain(..=end).collect());
            }
            let frame = self.body.frame().await;
            let frame = frame.ok_or_else(|| EtcdError::Unreachable(anyhow!("etcd: the watch ended")))?;
            let frame = frame.map_err(EtcdError::unreachable)?;
            self.rest.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            if self.rest.len() > MAX_LINE_BYTES {
                return Err(EtcdError::Unreachable(anyhow!("etcd: a line of the watch is too long")));
            }
        }
    }
}

fn is_created(line: &[u8]) -> bool {
    serde_json::from_slice::<Value>(line).is_ok_and(|value| value["result"]["created"] == true)
}

/// Events in a line of a watch.
pub(crate) fn parse_events(line: &[u8]) -> Result<Vec<EtcdEvent>, EtcdError> {
    let value: Value = serde_json::from_slice(line).map_err(EtcdError::unreachable)?;
    let result = &value["result"];
    // Compacted revision, missing right, or the member stops.
    if value.get("error").is_some() || result["canceled"] == true {
        let why = [&value["error"]["message"], &result["cancel_reason"], &value["error"]];
        let why = why.iter().find_map(|why| why.as_str()).unwrap_or("no reason given");
        return Err(EtcdError::Unreachable(anyhow!("etcd: the watch was cancelled: {why}")));
    }
    Ok(result["events"].as_array().into_iter().flatten().filter_map(EtcdEvent::read).collect())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpListener,
        thread,
    };

    use super::*;

    #[test]
    fn lines_are_events_or_errors() {
        let read = |value: Value| parse_events(value.to_string().as_bytes());
        assert!(read(json!({ "result": { "created": true } })).unwrap().is_empty());
        let deleted = json!({ "result": { "events": [{ "type": "DELETE", "kv": { "key": "YQ==" } }] } });
        assert_eq!(read(deleted).unwrap(), [EtcdEvent::Deleted("a".to_owned())]);
        for end in [
            json!({ "result": { "canceled": true, "cancel_reason": "compacted" } }),
            json!({ "error": { "message": "no leader" } }),
        ] {
            assert!(read(end).is_err());
        }
        assert!(parse_events(b"<html>").is_err());
    }

    /// Opens a watch at a member that replies with `line` and keeps the connection.
    fn open_with_reply(line: &str, timeout: Duration) -> Result<(), EtcdError> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let length = line.len();
        let reply = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{length:x}\r\n{line}\r\n");
        let member = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            assert!(stream.read(&mut request).unwrap() > 0);
            stream.write_all(reply.as_bytes()).unwrap();
            // Until the client disconnects.
            while stream.read(&mut request).is_ok_and(|count| count > 0) {}
        });
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
        let opened = runtime.block_on(async {
            let endpoint: settings::EtcdEndpoint = format!("http://{address}").parse().unwrap();
            let connection =
                EtcdConnection::open(endpoint, &[address], None, Duration::from_secs(60)).await?;
            let range = KeyRange::Prefix("a".to_owned());
            EtcdWatch::open(connection, &range, 1, None, timeout).await.map(drop)
        });
        drop(runtime);
        member.join().unwrap();
        opened
    }

    #[test]
    fn a_watch_needs_confirmation() {
        let timeout = Duration::from_secs(60);
        assert!(open_with_reply("{\"result\":{\"created\":true}}\n", timeout).is_ok());
        for other in ["{\"result\":{}}\n", "{\"result\":{\"created\":true,\"canceled\":true}}\n"] {
            assert!(open_with_reply(other, timeout).is_err(), "{other}");
        }
        assert!(open_with_reply("{\"result\"", Duration::from_millis(100)).is_err());
    }
}
