//! Validity of the examples in the reference of the config file.

use super::*;

fn documentation() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/config.md");
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn examples_of_the_documentation_are_valid() {
    let text = documentation();
    let examples: Vec<_> =
        text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(examples.len() >= 2, "there are examples");
    for example in examples {
        plan(example);
    }
}
