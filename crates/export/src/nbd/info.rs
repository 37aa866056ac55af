//! INFO and GO: everything about one export, and the terms transmission would have on it.
//!
//! The two differ in what follows the ACK alone. Size and flags are always sent; the block sizes too, because they
//! hold whether asked for or not, but a minimum above 1 binds only a client that asked ("Size constraints").

use super::catalog::{ExportInfo, Exports};
use super::option::{Refusal, Replies, Terms};
use super::proto::{info, rep};
use super::session::Session;
use super::wire::{self, Fields};

/// What INFO and GO carry.
struct Wanted<'a> {
    name: &'a str,
    canonical_name: bool,
    description: bool,
    block_sizes: bool,
}

/// `None` where the lengths do not add up. Kinds of information that are not known are ignored, as they MUST be.
fn parse(data: &[u8]) -> Option<Wanted<'_>> {
    let mut fields = Fields::new(data);
    let mut wanted =
        Wanted { name: fields.string()?, canonical_name: false, description: false, block_sizes: false };
    for _ in 0..fields.u16()? {
        match fields.u16()? {
            info::NAME => wanted.canonical_name = true,
            info::DESCRIPTION => wanted.description = true,
            info::BLOCK_SIZE => wanted.block_sizes = true,
            _ => {}
        }
    }
    fields.is_empty().then_some(wanted)
}

/// Answers INFO or GO, and returns the session GO starts.
pub(super) fn describe(
    terms: &Terms,
    data: &[u8],
    exports: &dyn Exports,
    replies: &mut Replies<'_>,
) -> Result<Session, Refusal> {
    let wanted = parse(data).ok_or(Refusal::invalid(
        "the lengths do not add up, or the name is not UTF-8 of at most 4096 bytes",
    ))?;
    let export = exports.find(wanted.name).ok_or(Refusal::unknown_export())?;
    let about = exports.get(export).ok_or(Refusal::unknown_export())?;
    let session = terms.session(export, &about, wanted.block_sizes);
    send(&wanted, &about, &session, replies);
    replies.ack();
    Ok(session)
}

fn send(wanted: &Wanted<'_>, about: &ExportInfo, session: &Session, replies: &mut Replies<'_>) {
    let mut item = |kind: u16, parts: [&[u8]; 3]| {
        replies.send(rep::INFO, &[&kind.to_be_bytes(), parts[0], parts[1], parts[2]]);
    };
    item(info::EXPORT, [&about.size_bytes.to_be_bytes(), &session.flags.to_be_bytes(), &[]]);
    if wanted.canonical_name
        && let Some(name) = wire::string(about.name.as_bytes())
    {
        item(info::NAME, [name.as_bytes(), &[], &[]]);
    }
    if wanted.description && !about.description.is_empty() {
        item(info::DESCRIPTION, [wire::clip(&about.description).as_bytes(), &[], &[]]);
    }
    let sizes = [session.minimum_block, about.sizes.preferred(), session.maximum_payload];
    let [minimum, preferred, maximum] = sizes.map(u32::to_be_bytes);
    item(info::BLOCK_SIZE, [&minimum, &preferred, &maximum]);
}
