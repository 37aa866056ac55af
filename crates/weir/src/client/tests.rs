//! The client against a scripted daemon.

use super::{fake::*, *};

fn connect_error(fake: &FakeDaemon) -> String {
    ControlClient::connect(fake.target()).err().unwrap().to_string()
}

#[test]
fn command_follows_negotiation_and_returns_its_value() {
    let fake = FakeDaemon::returning(&json!({ "running": true }));
    let mut client = ControlClient::connect(fake.target()).unwrap();
    assert_eq!(client.execute("query-status", json!({})).unwrap(), json!({ "running": true }));
    drop(client);
    assert_eq!(
        fake.commands(),
        [json!({ "execute": "qmp_capabilities" }), json!({ "execute": "query-status" })]
    );
}

#[test]
fn settings_are_arguments_beside_the_name() {
    let fake = FakeDaemon::returning(&json!({}));
    let settings = json!({ "iops-total": 5 }).as_object().unwrap().clone();
    ControlClient::connect(fake.target()).unwrap().set("vm1", settings).unwrap();
    let set = json!({ "execute": "x-weir-set", "arguments": { "name": "vm1", "iops-total": 5 } });
    assert_eq!(fake.commands()[1], set);
}

#[test]
fn interleaved_events_are_ignored() {
    let event = "{\"event\": \"SHUTDOWN\"}\n{\"return\": 1}".to_owned();
    let fake = FakeDaemon::start(GREETING, vec![event]);
    assert_eq!(ControlClient::connect(fake.target()).unwrap().execute("x", json!({})).unwrap(), json!(1));
}

#[test]
fn daemon_errors_are_reported_verbatim() {
    let refusal = |class: &str| format!(r#"{{"error": {{"class": "{class}", "desc": "too small"}}}}"#);
    let fake = FakeDaemon::start(GREETING, vec![refusal("GenericError"), refusal("CommandNotFound")]);
    let mut client = ControlClient::connect(fake.target()).unwrap();
    assert_eq!(client.execute("x", json!({})).unwrap_err().to_string(), "too small");
    let target = fake.target();
    let expect = format!("{target}: the server does not support x (is it weir of this version?)");
    assert_eq!(client.execute("x", json!({})).unwrap_err().to_string(), expect);
}

#[test]
fn missing_daemon_error_has_advice() {
    let target: ControlAddress = "unix:/nonexistent/qmp.sock".parse().unwrap();
    let message = ControlClient::connect(&target).err().unwrap().to_string();
    assert!(
        message.starts_with("unix:/nonexistent/qmp.sock: no daemon listens there (start it with"),
        "{message}"
    );
}

#[test]
fn non_qmp_server_is_detected() {
    let check = |greeting, expect: &str| {
        let message = connect_error(&FakeDaemon::start(greeting, Vec::new()));
        assert!(message.contains(expect), "{message}");
    };
    check("NBDMAGIC", "sent a response that is not JSON");
    check("{\"hello\": 1}", "did not send a QMP greeting");
}

#[test]
fn closed_connection_is_an_error() {
    let fake = FakeDaemon::start(GREETING, Vec::new());
    let mut client = ControlClient::connect(fake.target()).unwrap();
    let message = client.execute("x", json!({})).unwrap_err().to_string();
    assert!(message.contains("the daemon closed the connection"), "{message}");
}

#[test]
fn status_of_wrong_type_is_rejected() {
    let fake = FakeDaemon::returning(&json!({ "disks": [{ "name": 7 }] }));
    let message = ControlClient::connect(fake.target()).unwrap().status().err().unwrap().to_string();
    assert!(message.contains("sent a malformed status: invalid type"), "{message}");
}

#[test]
fn status_works_without_latency_counts() {
    let refusal = r#"{"error": {"class": "CommandNotFound", "desc": "no such command"}}"#.to_owned();
    let fake = FakeDaemon::start(GREETING, vec![r#"{"return": {"uptime-ns": 7}}"#.to_owned(), refusal]);
    let report = ControlClient::connect(fake.target()).unwrap().status_with_latencies().unwrap();
    assert_eq!((report.uptime_ns, report.latencies.len()), (7, 0));
}
