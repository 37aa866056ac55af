//! Effect and reply of each handshake option ("Option types"), once all of its data has arrived.
//! `negotiate` does framing and bounds. An option that fails changes only the state that the
//! specification resets.

use super::catalog::{ExportCatalog, ExportInfo};
use super::context::{MetaContext, MetaContexts};
use super::proto::{self, info, opt, rep};
use super::session::{NbdSession, ReplyStyle};
use super::wire::{self, WireFields};
use std::sync::Arc;

/// Result of the options so far.
#[derive(Clone, Debug, Default)]
pub(super) struct NegotiatedTerms {
    pub(super) fixed_newstyle: bool,
    pub(super) no_zeroes: bool,
    pub(super) secured: bool,
    pub(super) structured: bool,
    pub(super) extended: bool,
    /// The contexts selected last, and the export they apply to.
    pub(super) contexts: Option<(usize, MetaContexts)>,
}

impl NegotiatedTerms {
    pub(super) fn style(&self) -> ReplyStyle {
        if self.extended {
            ReplyStyle::Extended
        } else if self.structured {
            ReplyStyle::Structured
        } else {
            ReplyStyle::Simple
        }
    }

    pub(super) fn session(
        &self,
        export: usize,
        export_info: &ExportInfo,
        sizes_acknowledged: bool,
    ) -> NbdSession {
        // "SET_META_CONTEXT": a selection for another export does not count.
        let contexts = match self.contexts {
            Some((selected_for, contexts)) if selected_for == export => contexts,
            _ => MetaContexts::NONE,
        };
        NbdSession {
            export,
            style: self.style(),
            flags: export_info.features.flags(self.style(), !contexts.is_empty()),
            contexts,
            sizes_acknowledged,
            minimum_block: if sizes_acknowledged {
                export_info.sizes.minimum_for(export_info.size_bytes)
            } else {
                1
            },
            maximum_payload: export_info.sizes.maximum,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct OptionRejection {
    pub(super) kind: u32,
    pub(super) why: &'static str,
}

impl OptionRejection {
    pub(super) const fn invalid(why: &'static str) -> Self {
        Self { kind: rep::ERR_INVALID, why }
    }

    pub(super) const fn unknown_export() -> Self {
        Self { kind: rep::ERR_UNKNOWN, why: "no export of this name (LIST shows those there are)" }
    }
}

pub(super) enum OptionOutcome {
    Replied,
    List,
    StartTls,
    Transmission(NbdSession),
    /// EXPORT_NAME failed for this reason.
    NoExport(&'static str),
}

pub(super) struct OptionReplies<'a> {
    option: u32,
    out: &'a mut Vec<u8>,
}

impl<'a> OptionReplies<'a> {
    pub(super) fn new(option: u32, out: &'a mut Vec<u8>) -> Self {
        Self { option, out }
    }

    pub(super) fn len(&self) -> usize {
        self.out.len()
    }

    /// Appends a reply. Each part is a string or a few fields, so the sum fits 32 bits.
    pub(super) fn send(&mut self, kind: u32, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.out.extend_from_slice(&proto::OPTION_REPLY_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&self.option.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        self.out.extend_from_slice(&(length as u32).to_be_bytes());
        for part in parts {
            self.out.extend_from_slice(part);
        }
    }

    pub(super) fn ack(&mut self) {
        self.send(rep::ACK, &[]);
    }

    pub(super) fn reject(&mut self, refusal: OptionRejection) {
        self.send(refusal.kind, &[wire::truncated(refusal.why).as_bytes()]);
    }

    /// Appends one export of a LIST; omits it if the protocol cannot carry its name.
    pub(super) fn server(&mut self, export: &ExportInfo) {
        let Some(name) = wire::string(export.name.as_bytes()) else { return };
        let length = (name.len() as u32).to_be_bytes();
        self.send(rep::SERVER, &[&length, name.as_bytes(), wire::truncated(&export.description).as_bytes()]);
    }
}

pub(super) fn answer(
    terms: &mut NegotiatedTerms,
    option: u32,
    data: &[u8],
    exports: &dyn ExportCatalog,
    out: &mut Vec<u8>,
) -> OptionOutcome {
    if option == opt::EXPORT_NAME {
        // Its reply has another format than those of all other options.
        return export_name(terms, data, exports, out);
    }
    let mut replies = OptionReplies::new(option, out);
    let result = match option {
        opt::LIST => return OptionOutcome::List,
        opt::STARTTLS => start_tls(terms),
        opt::STRUCTURED_REPLY => structured_reply(terms),
        opt::EXTENDED_HEADERS => extended_headers(terms),
        opt::LIST_META_CONTEXT => list_contexts(data, exports, &mut replies),
        opt::SET_META_CONTEXT => set_contexts(terms, data, exports, &mut replies),
        opt::INFO => describe(terms, data, exports, &mut replies).map(|_| OptionOutcome::Replied),
        opt::GO => describe(terms, data, exports, &mut replies).map(OptionOutcome::Transmission),
        _ => Err(OptionRejection { kind: rep::ERR_UNSUP, why: "unknown option" }),
    };
    match &result {
        Ok(_) => replies.ack(),
        Err(refusal) => replies.reject(*refusal),
    }
    result.unwrap_or(OptionOutcome::Replied)
}

fn export_name(
    terms: &NegotiatedTerms,
    data: &[u8],
    exports: &dyn ExportCatalog,
    out: &mut Vec<u8>,
) -> OptionOutcome {
    let Some(name) = wire::string(data) else {
        return OptionOutcome::NoExport("the name is not UTF-8 without NUL");
    };
    let found = exports.find(name).and_then(|export| Some((export, exports.get(export)?)));
    let Some((export, export_info)) = found else {
        return OptionOutcome::NoExport("no export of this name");
    };
    let session = terms.session(export, &export_info, false);
    out.extend_from_slice(&export_info.size_bytes.to_be_bytes());
    out.extend_from_slice(&session.flags.to_be_bytes());
    // 124 zeroes, unless both sides set NO_ZEROES ("NBD_OPT_EXPORT_NAME").
    if !terms.no_zeroes {
        out.extend_from_slice(&[0; proto::EXPORT_NAME_PADDING]);
    }
    OptionOutcome::Transmission(session)
}

fn start_tls(terms: &mut NegotiatedTerms) -> Result<OptionOutcome, OptionRejection> {
    if terms.secured {
        return Err(OptionRejection::invalid("TLS is already in use"));
    }
    // STARTTLS: "the server MUST NOT preserve any negotiation state".
    let NegotiatedTerms { fixed_newstyle, no_zeroes, .. } = *terms;
    *terms = NegotiatedTerms { fixed_newstyle, no_zeroes, secured: true, ..NegotiatedTerms::default() };
    Ok(OptionOutcome::StartTls)
}

fn structured_reply(terms: &mut NegotiatedTerms) -> Result<OptionOutcome, OptionRejection> {
    if terms.extended {
        // Extended headers imply chunks, so structured replies cannot follow them.
        let why = "extended headers are already negotiated and take precedence";
        return Err(OptionRejection { kind: rep::ERR_EXT_HEADER_REQD, why });
    }
    if terms.structured {
        return Err(OptionRejection::invalid("structured replies are already negotiated"));
    }
    terms.structured = true;
    Ok(OptionOutcome::Replied)
}

fn extended_headers(terms: &mut NegotiatedTerms) -> Result<OptionOutcome, OptionRejection> {
    if terms.extended {
        return Err(OptionRejection::invalid("extended headers are already negotiated"));
    }
    terms.extended = true;
    Ok(OptionOutcome::Replied)
}

struct ContextQueries<'a> {
    export: usize,
    bitmaps: Arc<[Arc<str>]>,
    texts: Vec<&'a str>,
}

/// Parses the data of LIST_META_CONTEXT and SET_META_CONTEXT. Allocates at most one pointer for
/// each four bytes of `data`, whatever count the client announces.
fn queries<'a>(data: &'a [u8], exports: &dyn ExportCatalog) -> Result<ContextQueries<'a>, OptionRejection> {
    let malformed =
        OptionRejection::invalid("the lengths do not add up, or a string is not UTF-8 of at most 4096 bytes");
    let mut fields = WireFields::new(data);
    let name = fields.string().ok_or(malformed)?;
    let count = fields.u32().ok_or(malformed)?;
    let mut texts = Vec::new();
    for _ in 0..count {
        texts.push(fields.string().ok_or(malformed)?);
    }
    if !fields.is_empty() {
        return Err(malformed);
    }
    let export = exports.find(name).ok_or(OptionRejection::unknown_export())?;
    let bitmaps = exports.get(export).ok_or(OptionRejection::unknown_export())?.bitmaps;
    Ok(ContextQueries { export, bitmaps, texts })
}

fn send_context(replies: &mut OptionReplies<'_>, id: u32, name: &str) {
    replies.send(rep::META_CONTEXT, &[&id.to_be_bytes(), name.as_bytes()]);
}

/// Allowed before structured replies too: the specification leaves that to the server.
fn list_contexts(
    data: &[u8],
    exports: &dyn ExportCatalog,
    replies: &mut OptionReplies<'_>,
) -> Result<OptionOutcome, OptionRejection> {
    let ContextQueries { bitmaps, texts, .. } = queries(data, exports)?;
    for context in MetaContext::of_export(bitmaps.len()) {
        let name = context.name(&bitmaps);
        if texts.is_empty() || texts.iter().any(|query| MetaContext::is_listed_by(&name, query)) {
            send_context(replies, 0, &name);
        }
    }
    Ok(OptionOutcome::Replied)
}

fn set_contexts(
    terms: &mut NegotiatedTerms,
    data: &[u8],
    exports: &dyn ExportCatalog,
    replies: &mut OptionReplies<'_>,
) -> Result<OptionOutcome, OptionRejection> {
    if !terms.style().has_chunks() {
        // Block status replies are chunks ("NBD_OPT_SET_META_CONTEXT").
        return Err(OptionRejection::invalid(
            "metadata contexts need structured replies or extended headers first",
        ));
    }
    let ContextQueries { export, bitmaps, texts } = queries(data, exports)?;
    let mut contexts = MetaContexts::NONE;
    for context in MetaContext::of_export(bitmaps.len()) {
        let name = context.name(&bitmaps);
        // LIST accepts a namespace or an empty list of queries; SET selects by full names only.
        if texts.iter().any(|query| *query == name) && contexts.insert(context) {
            send_context(replies, context.id(), &name);
        }
    }
    terms.contexts = Some((export, contexts));
    Ok(OptionOutcome::Replied)
}

struct InfoRequest<'a> {
    name: &'a str,
    canonical_name: bool,
    description: bool,
    block_sizes: bool,
}

/// Parses the data of INFO and GO; `None` if the lengths do not add up. Unknown kinds of
/// information MUST be ignored.
fn parse_info_request(data: &[u8]) -> Option<InfoRequest<'_>> {
    let mut fields = WireFields::new(data);
    let mut request =
        InfoRequest { name: fields.string()?, canonical_name: false, description: false, block_sizes: false };
    for _ in 0..fields.u16()? {
        match fields.u16()? {
            info::NAME => request.canonical_name = true,
            info::DESCRIPTION => request.description = true,
            info::BLOCK_SIZE => request.block_sizes = true,
            _ => {}
        }
    }
    fields.is_empty().then_some(request)
}

/// Answers INFO or GO, and returns the session that GO starts. Block sizes are always sent, but a
/// minimum above 1 binds only a client that requested them ("Size constraints").
fn describe(
    terms: &NegotiatedTerms,
    data: &[u8],
    exports: &dyn ExportCatalog,
    replies: &mut OptionReplies<'_>,
) -> Result<NbdSession, OptionRejection> {
    let request = parse_info_request(data).ok_or(OptionRejection::invalid(
        "the lengths do not add up, or the name is not UTF-8 of at most 4096 bytes",
    ))?;
    let export = exports.find(request.name).ok_or(OptionRejection::unknown_export())?;
    let export_info = exports.get(export).ok_or(OptionRejection::unknown_export())?;
    let session = terms.session(export, &export_info, request.block_sizes);
    send_info(&request, &export_info, &session, replies);
    Ok(session)
}

fn send_info(
    request: &InfoRequest<'_>,
    export_info: &ExportInfo,
    session: &NbdSession,
    replies: &mut OptionReplies<'_>,
) {
    let mut item = |kind: u16, parts: [&[u8]; 3]| {
        replies.send(rep::INFO, &[&kind.to_be_bytes(), parts[0], parts[1], parts[2]]);
    };
    // Mandatory in every reply to INFO and GO, whether the client requested it or not.
    item(info::EXPORT, [&export_info.size_bytes.to_be_bytes(), &session.flags.to_be_bytes(), &[]]);
    if request.canonical_name
        && let Some(name) = wire::string(export_info.name.as_bytes())
    {
        item(info::NAME, [name.as_bytes(), &[], &[]]);
    }
    if request.description && !export_info.description.is_empty() {
        item(info::DESCRIPTION, [wire::truncated(&export_info.description).as_bytes(), &[], &[]]);
    }
    let sizes = [session.minimum_block, export_info.sizes.preferred, session.maximum_payload];
    let [minimum, preferred, maximum] = sizes.map(u32::to_be_bytes);
    item(info::BLOCK_SIZE, [&minimum, &preferred, &maximum]);
}
