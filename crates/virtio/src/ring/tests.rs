//! Rings beside their driver: what the specification says, line by line; any behaviour of both
//! sides; and the end of the device before any store.

mod cost;
mod crash;
mod rules;
mod traffic;
mod world;
