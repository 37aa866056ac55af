//! The client against a scripted daemon.

use super::{fake::*, *};

fn connect_error(fake: &Fake) -> String {
    Client::connect(fake.target()).err().unwrap().to_string()
}

#[test]
fn a_command_is_sent_after_negotiation_and_its_value_returned() {
    let fake = Fake::returning(&json!({ "running": true }));
    let mut client = Client::connect(fake.target()).unwrap();
    assert_eq!(client.execute("query-status", json!({})).unwrap(), json!({ "running": true }));
    drop(client);
    assert_eq!(
        fake.asked(),
        [json!({ "execute": "qmp_capabilities" }), json!({ "execute": "query-status" })]
    );
}

#[test]
fn settings_go_as_arguments_beside_the_name() {
    let fake = Fake::returning(&json!({}));
    let settings = json!({ "iops-total": 5 }).as_object().unwrap().clone();
    Client::connect(fake.target()).unwrap().set("vm1", settings).unwrap();
    let set = json!({ "execute": "x-weir-set", "arguments": { "name": "vm1", "iops-total": 5 } });
    assert_eq!(fake.asked()[1], set);
}

#[test]
fn events_between_are_passed_over() {
    let event = "{\"event\": \"SHUTDOWN\"}\n{\"return\": 1}".to_owned();
    let fake = Fake::start(GREETING, vec![event]);
    assert_eq!(Client::connect(fake.target()).unwrap().execute("x", json!({})).unwrap(), json!(1));
}

#[test]
fn a_refusal_is_told_in_the_daemon_s_words() {
    let refusal = |class: &str| format!(r#"{{"error": {{"class": "{class}", "desc": "too small"}}}}"#);
    let fake = Fake::start(GREETING, vec![refusal("GenericError"), refusal("CommandNotFound")]);
    let mut client = Client::connect(fake.target()).unwrap();
    assert_eq!(client.execute("x", json!({})).unwrap_err().to_string(), "too small");
    let target = fake.target();
    let expect = format!("{target}: the server does not support x (is it weir of this version?)");
    assert_eq!(client.execute("x", json!({})).unwrap_err().to_string(), expect);
}

#[test]
fn nobody_there_is_said_with_what_to_do() {
    let target: Target = "unix:/nonexistent/qmp.sock".parse().unwrap();
    let said = Client::connect(&target).err().unwrap().to_string();
    assert!(said.starts_with("unix:/nonexistent/qmp.sock: no daemon listens there (start it with"), "{said}");
}

#[test]
fn what_is_no_qmp_server_is_recognised() {
    let check = |greeting, expect: &str| {
        let said = connect_error(&Fake::start(greeting, Vec::new()));
        assert!(said.contains(expect), "{said}");
    };
    check("NBDMAGIC", "sent a response that is not JSON");
    check("{\"hello\": 1}", "did not send a QMP greeting");
}

#[test]
fn a_daemon_that_hangs_up_is_no_success() {
    let fake = Fake::start(GREETING, Vec::new());
    let mut client = Client::connect(fake.target()).unwrap();
    let said = client.execute("x", json!({})).unwrap_err().to_string();
    assert!(said.contains("the daemon closed the connection"), "{said}");
}

#[test]
fn a_status_of_a_wrong_type_is_refused() {
    let fake = Fake::returning(&json!({ "disks": [{ "name": 7 }] }));
    let said = Client::connect(fake.target()).unwrap().status().err().unwrap().to_string();
    assert!(said.contains("sent a malformed status: invalid type"), "{said}");
}

#[test]
fn a_daemon_that_counts_no_latencies_has_a_status_all_the_same() {
    let refusal = r#"{"error": {"class": "CommandNotFound", "desc": "no such command"}}"#.to_owned();
    let fake = Fake::start(GREETING, vec![r#"{"return": {"uptime-ns": 7}}"#.to_owned(), refusal]);
    let report = Client::connect(fake.target()).unwrap().measured().unwrap();
    assert_eq!((report.uptime_ns, report.latencies.len()), (7, 0));
}
