//! Throttling in virtual time: one file for each subject, all on the same [`timeline::Timeline`].
//!
//! No test sleeps or reads a clock, so every number is exact.

mod accuracy;
mod booking;
mod bursts;
mod caps;
mod changes;
mod every_order;
mod fairness;
mod groups;
mod moves;
mod naive;
mod nesting;
mod observed;
mod parts;
mod properties;
mod queueing;
mod sequences;
mod shares;
mod slices;
mod spare;
mod timeline;
mod upgrade;
