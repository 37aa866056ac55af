//! The reference of the config file has every key, and its examples are valid.

use super::*;

fn documentation() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/config.md");
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn the_documentation_has_every_key_and_no_other() {
    let mistakes = Mistakes::default();
    let source = Source::new("", "", &mistakes);
    let table = DeTable::new();
    let reader = Reader { directory: Path::new("") };
    let text = documentation();
    let documented = |heading: &str| -> Vec<String> {
        let section = text.split("\n## ").find(|section| section.starts_with(heading)).expect(heading);
        let key = |line: &str| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned());
        let mut keys: Vec<_> = section.lines().filter_map(key).collect();
        keys.sort();
        keys
    };
    let known = |read: &dyn Fn(&Section<'_>), without: &[String]| -> Vec<String> {
        let section = Section::root(&source, &table);
        read(&section);
        let mut keys: Vec<_> = section.asked().into_iter().map(str::to_owned).collect();
        keys.retain(|key| !without.contains(key));
        keys.sort();
        keys
    };
    let nobody = || Said::new(String::new(), Place::new(""));
    let limits = known(&|section| drop(limits(section)), &[]);
    let settings = known(&|section| drop(settings(section)), &[]);
    let shares: Vec<_> = settings.iter().filter(|key| !limits.contains(key)).cloned().collect();
    let daemon = known(&|section| drop(reader.daemon(section)), &[]);
    let disk = known(&|section| drop(reader.disk(nobody(), section)), &settings);
    let group = known(&|section| drop(group(nobody(), section)), &settings);
    assert_eq!(documented("`[daemon]`"), daemon);
    assert_eq!(documented("`[disk.NAME]`"), disk);
    assert_eq!(documented("`[group.NAME]`"), group);
    assert_eq!(documented("Limits"), limits);
    assert_eq!(documented("Shares"), shares);
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
