//! A table of machines, each with one thing in its way: the cause that `explain` names, and no
//! other.

mod machine;
mod table;
