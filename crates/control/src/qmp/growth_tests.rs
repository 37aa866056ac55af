//! Cost of commands as the number of disks and groups grows, counted in entries visited by full
//! passes over the registry.

use std::rc::Rc;

use serde_json::{Value, json};

use super::{
    arguments::QmpArguments, command::CommandTable, commands::TABLE, error::QmpError,
    server::CommandExecutor as _,
};
use crate::registry::{Registry, visits};

async fn run(commands: &CommandTable, name: &str, arguments: Value) -> Result<Value, QmpError> {
    let Value::Object(arguments) = arguments else { panic!("arguments are an object") };
    let reply = commands.execute(name, QmpArguments::new(arguments))?.await?;
    Ok(serde_json::to_value(reply).expect("all keys are strings"))
}

fn disk(number: usize, group: &str) -> Value {
    json!({ "name": format!("disk{number}"), "keys": { "image": "null:1M", "format": "raw", "group": group } })
}

/// Entries visited while `count` groups with one disk each are added, and a group in each is
/// refused; and then by a query of the status.
fn visits_for(count: usize) -> (u64, u64) {
    reactor::sim::run(1, async move {
        let registry = Registry::new(None, Rc::new(|_| ()));
        registry.read_capacities(None);
        registry.check_devices().expect("nothing is reserved");
        registry.follow_devices();
        let commands = CommandTable { table: TABLE, registry: Rc::clone(&registry) };
        visits::take_count();
        for number in 0..count {
            let group = format!("group{number}");
            let added = json!({ "name": group, "keys": { "iops-total": 1000 } });
            run(&commands, "x-weir-add-group", added).await.expect("a new group");
            run(&commands, "x-weir-add-disk", disk(number, &group)).await.expect("a new disk");
            let above_limit = json!({ "group": group, "iops-reservation": 1001 });
            let refused = json!({ "name": "refused", "keys": above_limit });
            run(&commands, "x-weir-add-group", refused).await.expect_err("more than the limit");
            // Listeners defer their work to a later pass of the executor.
            reactor::yield_now().await;
            reactor::yield_now().await;
        }
        let added = visits::take_count();
        let status = run(&commands, "x-weir-query-status", json!({})).await.expect("an answer");
        assert_eq!(status["groups"].as_array().map(Vec::len), Some(count));
        assert_eq!(status["groups"][0]["disks"], json!(["disk0"]));
        let listed = visits::take_count();
        let summary =
            run(&commands, "x-weir-query-status", json!({ "lists": false })).await.expect("an answer");
        assert!(summary["servers"].is_array() && summary.get("disks").is_none(), "{summary}");
        assert_eq!(visits::take_count(), 0, "a summary visits neither disks nor groups");
        (added, listed)
    })
}

#[test]
fn adding_visits_no_other_object() {
    assert_eq!(visits_for(100).0, 0);
}

#[test]
fn status_takes_linear_time() {
    let (few, many) = (visits_for(50).1, visits_for(400).1);
    assert!(few > 0 && many <= 8 * few, "{few} visits for 50, {many} for 400");
}
