//! The reference of the config file has every key, and its examples are valid.

use super::*;

fn documentation() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/config.md");
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn the_documentation_has_every_key_and_no_other() {
    let text = documentation();
    let documented = |heading: &str| -> Vec<String> {
        let section = text.split("\n## ").find(|section| section.starts_with(heading)).expect(heading);
        let key = |line: &str| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned());
        let mut keys: Vec<_> = section.lines().filter_map(key).collect();
        keys.sort();
        keys
    };
    fn keys<T: KeySet>(is_in: impl Fn(&str) -> bool) -> Vec<String> {
        let of_heading = T::keys().iter().filter(|key| is_in(key.heading));
        let mut keys: Vec<_> = of_heading.map(|key| key.name.to_owned()).collect();
        keys.sort();
        keys
    }
    assert_eq!(documented("`[daemon]`"), keys::<DaemonConfig>(|_| true));
    assert_eq!(documented("`[cluster]`"), keys::<Cluster>(|_| true));
    let is_own = |heading: &str| !["Limits", "Shares"].contains(&heading);
    assert_eq!(documented("`[disk.NAME]`"), keys::<DiskConfig>(is_own));
    assert_eq!(documented("`[group.NAME]`"), keys::<GroupConfig>(is_own));
    assert_eq!(documented("Limits"), keys::<GroupConfig>(|heading| heading == "Limits"));
    assert_eq!(documented("Shares"), keys::<GroupConfig>(|heading| heading == "Shares"));
}

#[test]
fn the_documentation_s_examples_are_plans() {
    let text = documentation();
    let examples: Vec<_> =
        text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(examples.len() >= 2, "there are examples");
    for example in examples {
        plan(example);
    }
}
