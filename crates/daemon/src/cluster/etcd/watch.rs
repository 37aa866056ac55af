//! What changes in etcd, as it changes: an answer that does not end, a JSON object a line.

use std::time::Duration;

use anyhow::anyhow;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::{
    Error,
    connection::Connection,
    message::{Event, Range},
};

/// Of a line: the changes of one revision, or those since a revision that are read together.
const MAX_LINE_BYTES: usize = 64 << 20;

#[derive(Debug)]
pub(in crate::cluster) struct Watch {
    /// It ends with this.
    _connection: Connection,
    body: Incoming,
    rest: Vec<u8>,
}

impl Watch {
    pub(super) async fn open(
        mut connection: Connection,
        ranges: &[Range],
        from: i64,
        token: Option<&str>,
        patience: Duration,
    ) -> Result<Self, Error> {
        let mut request = Vec::new();
        for range in ranges {
            let mut create = range.body();
            create["start_revision"] = json!(from.to_string());
            request.extend(json!({ "create_request": create }).to_string().into_bytes());
            request.push(b'\n');
        }
        let begun = tokio::time::timeout(patience, connection.begin("/v3/watch", request, token)).await;
        let response = begun.map_err(|_| Error::Unreachable(anyhow!("etcd: it begins no watch")))??;
        if !response.status().is_success() {
            return Err(Error::Unreachable(anyhow!("etcd: it does not watch: {}", response.status())));
        }
        Ok(Self { _connection: connection, body: response.into_body(), rest: Vec::new() })
    }

    /// What happened next, in its order. May be empty.
    ///
    /// # Errors
    /// If it ends: then all is to be read anew.
    pub(in crate::cluster) async fn next(&mut self) -> Result<Vec<Event>, Error> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return events(&line);
            }
            let frame = self.body.frame().await;
            let frame = frame.ok_or_else(|| Error::Unreachable(anyhow!("etcd: the watch ended")))?;
            let frame = frame.map_err(Error::unreachable)?;
            self.rest.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            if self.rest.len() > MAX_LINE_BYTES {
                return Err(Error::Unreachable(anyhow!("etcd: it sends a line without an end")));
            }
        }
    }
}

fn events(line: &[u8]) -> Result<Vec<Event>, Error> {
    let value: Value = serde_json::from_slice(line).map_err(Error::unreachable)?;
    let result = &value["result"];
    // Compacted, without a right, or the member stops.
    if value.get("error").is_some() || result["canceled"] == true {
        let why = [&value["error"]["message"], &result["cancel_reason"], &value["error"]];
        let why = why.iter().find_map(|why| why.as_str()).unwrap_or("no reason given");
        return Err(Error::Unreachable(anyhow!("etcd: the watch was ended: {why}")));
    }
    Ok(result["events"].as_array().into_iter().flatten().filter_map(Event::read).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_what_happened_or_the_end() {
        let read = |value: Value| events(value.to_string().as_bytes());
        assert!(read(json!({ "result": { "created": true } })).unwrap().is_empty());
        let deleted = json!({ "result": { "events": [{ "type": "DELETE", "kv": { "key": "YQ==" } }] } });
        assert_eq!(read(deleted).unwrap(), [Event::Deleted("a".to_owned())]);
        for end in [
            json!({ "result": { "canceled": true, "cancel_reason": "compacted" } }),
            json!({ "error": { "message": "no leader" } }),
        ] {
            assert!(read(end).is_err());
        }
        assert!(events(b"<html>").is_err());
    }
}
