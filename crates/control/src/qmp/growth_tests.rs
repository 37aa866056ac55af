//! Cost of commands as the number of disks and groups grows, counted in entries visited by full
//! passes over the registry.

use std::rc::Rc;

use serde_json::{Value, json};

use super::{arguments::Arguments, command::Commands, commands::TABLE, error::Error, server::Execute as _};
use crate::registry::{Registry, visits};

async fn run(commands: &Commands, name: &str, arguments: Value) -> Result<Value, Error> {
    let Value::Object(arguments) = arguments else { panic!("arguments are an object") };
    let reply = commands.execute(name, Arguments::new(arguments))?.await?;
    Ok(serde_json::to_value(reply).expect("all keys are strings"))
}

fn disk(number: usize, group: &str) -> Value {
    json!({ "name": format!("disk{number}"), "keys": { "image": "null:1M", "format": "raw", "group": group } })
}

/// Entries visited while `count` groups with one disk each are added, and then by a query of the
/// status.
fn visited(count: usize) -> (u64, u64) {
    reactor::sim::run(1, async move {
        let registry = Registry::new(None, Rc::new(|_| ()));
        registry.know_devices(None);
        registry.check_devices().expect("nothing is reserved");
        registry.follow_devices();
        let commands = Commands { table: TABLE, registry: Rc::clone(&registry) };
        visits::take();
        for number in 0..count {
            let group = format!("group{number}");
            let added = json!({ "name": group, "keys": {} });
            run(&commands, "x-weir-add-group", added).await.expect("a new group");
            run(&commands, "x-weir-add-disk", disk(number, &group)).await.expect("a new disk");
            // Listeners defer their work to a later turn of the executor.
            reactor::yield_now().await;
            reactor::yield_now().await;
        }
        let added = visits::take();
        let status = run(&commands, "x-weir-query-status", json!({})).await.expect("an answer");
        assert_eq!(status["groups"].as_array().map(Vec::len), Some(count));
        assert_eq!(status["groups"][0]["disks"], json!(["disk0"]));
        let listed = visits::take();
        let summary =
            run(&commands, "x-weir-query-status", json!({ "lists": false })).await.expect("an answer");
        assert!(summary["servers"].is_array() && summary.get("disks").is_none(), "{summary}");
        assert_eq!(visits::take(), 0, "a summary visits neither disks nor groups");
        (added, listed)
    })
}

#[test]
fn adding_a_disk_or_a_group_visits_no_other() {
    assert_eq!(visited(100).0, 0);
}

#[test]
fn the_status_visits_each_disk_and_group_a_few_times() {
    let (few, many) = (visited(50).1, visited(400).1);
    assert!(few > 0 && many <= 8 * few, "{few} visits for 50, {many} for 400");
}
