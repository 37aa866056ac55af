//! A table of machines, each with one problem: `explain` must name that cause and no other.

mod machine;
mod table;
