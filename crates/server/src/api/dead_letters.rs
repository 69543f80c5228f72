//! Dead letters over HTTP: list, show, retry, edit, bulk retry and purge with a preview.

use axum::extract::{Path, State};
use everbus::{
    Bus, Clock as _, DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetterPreview, EventId,
    GroupName, PageRequest, Pattern, Position, PurgeBasis, SystemClock, Timestamp,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::Answer;
use super::publish::event_id;
use super::shapes::EventShape;
use crate::auth::{Caller, Scope};
use crate::body::{Input, Params};
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

pub(super) fn routes() -> Vec<Route> {
    let (read, operate) = (Access::Scope(Scope::Read), Access::Scope(Scope::Operate));
    vec![
        Route::get("/v1/dead-letters", read, list)
            .summary("Open dead letters, newest event first, page by page")
            .query::<LettersQuery>()
            .returns::<LettersPage>(200),
        Route::get("/v1/dead-letters/{id}", read, show)
            .summary("The dead letters of an event: one for each group that gave up on it")
            .returns::<Letters>(200),
        Route::post("/v1/dead-letters/{id}/retry", operate, retry)
            .summary("Retries an event in the groups that gave up on it")
            .json::<RetryOne>()
            .returns::<Retried>(200),
        Route::post("/v1/dead-letters/{id}/edit", operate, edit)
            .summary("Publishes a corrected payload for the group that gave up, instead of the dead letter")
            .json::<Edit>()
            .returns::<Edited>(200),
        Route::post("/v1/dead-letters/preview", read, preview)
            .summary("What a bulk retry or a purge with this filter would touch")
            .json::<LetterFilter>()
            .returns::<Preview>(200),
        Route::post("/v1/dead-letters/retry", operate, retry_all)
            .summary("Retries every open dead letter that passes the filter")
            .json::<Bulk>()
            .returns::<Retried>(200),
        Route::post("/v1/dead-letters/purge", operate, purge)
            .summary("Deletes the dead letters that pass the filter, up to a time")
            .json::<Purge>()
            .returns::<PurgedCount>(200),
    ]
}

#[derive(Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LettersQuery {
    /// Only of this group.
    pub(crate) group: Option<String>,
    /// Only types that match.
    #[serde(rename = "type")]
    pub(crate) event_type: Option<String>,
    /// Only of this tenant.
    pub(crate) tenant: Option<String>,
    /// Only those whose last error contains this text.
    pub(crate) error: Option<String>,
    /// At most this many; 100 unless given, 1000 at most.
    pub(crate) limit: Option<usize>,
    /// Where to continue: `next` of the page before.
    pub(crate) cursor: Option<String>,
}

/// Selects open dead letters; an empty filter selects all of them.
#[derive(Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LetterFilter {
    /// Only of this group.
    pub(crate) group: Option<String>,
    /// Only types that match.
    #[serde(rename = "type")]
    pub(crate) event_type: Option<String>,
    /// Only of this event.
    pub(crate) id: Option<String>,
    /// Only of this tenant.
    pub(crate) tenant: Option<String>,
    /// Only those whose last error contains this text.
    pub(crate) error: Option<String>,
    /// Only events received at or after this time.
    #[schemars(with = "Option<String>")]
    pub(crate) since: Option<Timestamp>,
    /// Only events received at or before this time.
    #[schemars(with = "Option<String>")]
    pub(crate) until: Option<Timestamp>,
}

impl LetterFilter {
    /// The filter for the store, limited to the tenant of the caller.
    pub(crate) fn filter(&self, caller: &Caller) -> Result<DeadLetterFilter, Problem> {
        let mut filter = DeadLetterFilter {
            group: None,
            tenant: caller.tenant_filter(self.tenant.clone())?,
            error: self.error.clone(),
            since: self.since,
            until: self.until,
            ..DeadLetterFilter::default()
        };
        if let Some(pattern) = &self.event_type {
            filter.pattern = Some(Pattern::new(&everbus::streams::canonical(pattern))?);
        }
        if let Some(id) = &self.id {
            filter.id = Some(event_id(id, None));
        }
        if let Some(group) = &self.group {
            filter.group = Some(group_of_letter(caller, group)?);
        }
        Ok(filter)
    }
}

/// Parses the name of the group of a dead letter. `shared:NAME` is a group that serves every tenant: events of a tenant
/// may be dead letters there. The filter by tenant hides the events of other tenants.
fn group_of_letter(caller: &Caller, name: &str) -> Result<GroupName, Problem> {
    match name.strip_prefix("shared:") {
        Some(shared) if caller.tenant().is_some() && !shared.starts_with('@') => {
            Ok(shared.parse()?)
        }
        _ => Ok(caller.group(name)?),
    }
}

/// The name of the group of a dead letter, in the form that [`group_of_letter`] parses.
pub(crate) fn group_shown(caller: &Caller, group: &GroupName) -> Option<String> {
    match caller.group_shown(group) {
        Some(name) => Some(name),
        None => Some(format!("shared:{}", caller.group_beside_event(group)?)),
    }
}

/// One dead letter as the caller sees it.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Letter {
    /// The group that gave up. `shared:NAME` is a group that serves every tenant.
    pub(crate) group: String,
    /// The event and the error of every attempt.
    #[serde(flatten)]
    #[schemars(with = "LetterShape")]
    pub(crate) letter: Value,
}

/// The fields of a dead letter besides its group.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
struct LetterShape {
    attempts: u32,
    failures: Vec<super::shapes::FailureShape>,
    first_seen_at: String,
    died_at: String,
    retried_at: Option<String>,
    replaced_by: Option<String>,
    event: EventShape,
}

impl Letter {
    pub(crate) fn of(caller: &Caller, letter: &DeadLetter) -> Option<Self> {
        let group = group_shown(caller, &letter.group)?;
        let mut value = serde_json::to_value(letter).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            fields.remove("group");
        }
        Some(Self {
            group,
            letter: value,
        })
    }
}

/// A page of dead letters.
#[derive(Serialize, JsonSchema)]
struct LettersPage {
    items: Vec<Letter>,
    /// The cursor of the next page, if there may be one.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// One page of the dead letters that the caller may see. The dashboard uses it too.
pub(crate) async fn page(
    bus: &Bus,
    caller: &Caller,
    query: &LettersQuery,
) -> Result<(Vec<DeadLetter>, Option<String>), Problem> {
    let filter = LetterFilter {
        group: query.group.clone(),
        event_type: query.event_type.clone(),
        tenant: query.tenant.clone(),
        error: query.error.clone(),
        ..LetterFilter::default()
    };
    let limit = query.limit.unwrap_or(100);
    if limit == 0 || limit > 1000 {
        return Err(Problem::bad_request("the limit is between 1 and 1000"));
    }
    let after = query.cursor.as_deref().filter(|cursor| !cursor.is_empty());
    let request = PageRequest {
        limit,
        offset: 0,
        after: after.map(parse_cursor).transpose()?,
    };
    let filter = filter.filter(caller)?;
    let page = bus.dead_letters().list_page(filter, request).await?;
    Ok((page.items, page.next.as_ref().map(cursor)))
}

/// `POSITION~GROUP`.
fn cursor(key: &DeadLetterKey) -> String {
    let text = serde_json::to_value(key.position).unwrap_or_default();
    let position = text
        .as_str()
        .map_or_else(|| text.to_string(), str::to_owned);
    format!("{position}~{}", key.group)
}

fn parse_cursor(text: &str) -> Result<DeadLetterKey, Problem> {
    let bad = || Problem::bad_request("this is not a cursor: use `next` of a page as it is");
    let (position, group) = text.split_once('~').ok_or_else(bad)?;
    let position: Position = position.parse().map_err(|_| bad())?;
    let group: GroupName = group.parse()?;
    Ok(DeadLetterKey { position, group })
}

async fn list(
    State(state): State<AppState>,
    caller: Caller,
    Params(query): Params<LettersQuery>,
) -> Result<Answer<LettersPage>, Problem> {
    let (letters, next) = page(state.bus(), &caller, &query).await?;
    let items = letters.iter().filter_map(|l| Letter::of(&caller, l));
    Ok(Answer(LettersPage {
        items: items.collect(),
        next,
    }))
}

#[derive(Serialize, JsonSchema)]
struct Letters {
    items: Vec<Letter>,
}

/// The dead letters of an event that the caller may see.
pub(crate) async fn of_event(
    bus: &Bus,
    caller: &Caller,
    id: EventId,
) -> Result<Vec<DeadLetter>, Problem> {
    let all = bus.dead_letters().get(id).await?;
    let seen = all
        .into_iter()
        .filter(|letter| caller.sees(letter.event().tenant()));
    Ok(seen.collect())
}

async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Answer<Letters>, Problem> {
    let letters = of_event(state.bus(), &caller, event_id(&id, None)).await?;
    let items: Vec<_> = letters
        .iter()
        .filter_map(|l| Letter::of(&caller, l))
        .collect();
    if items.is_empty() {
        return Err(Problem::not_found(format!(
            "the event {id:?} has no dead letter"
        )));
    }
    Ok(Answer(Letters { items }))
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct RetryOne {
    /// Only in this group.
    group: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct Retried {
    /// How many dead letters were retried.
    retried: u64,
}

async fn retry(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Input(one): Input<RetryOne>,
) -> Result<Answer<Retried>, Problem> {
    let filter = LetterFilter {
        id: Some(id.clone()),
        group: one.group,
        ..LetterFilter::default()
    };
    let filter = filter.filter(&caller)?;
    match state.bus().dead_letters().retry_all(filter).await? {
        0 => Err(Problem::not_found(format!(
            "the event {id:?} has no open dead letter"
        ))),
        retried => Ok(Answer(Retried { retried })),
    }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Edit {
    /// The group that gave up; needed if several did.
    #[serde(default)]
    group: Option<String>,
    /// The corrected payload.
    #[schemars(with = "serde_json::Value")]
    payload: Box<RawValue>,
}

#[derive(Serialize, JsonSchema)]
struct Edited {
    /// The id of the corrected event.
    id: String,
    /// The id of the original.
    edit_of: String,
}

async fn edit(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Input(edit): Input<Edit>,
) -> Result<Answer<Edited>, Problem> {
    let wanted = edit
        .group
        .as_deref()
        .map(|name| group_of_letter(&caller, name))
        .transpose()?;
    let letters = of_event(state.bus(), &caller, event_id(&id, None)).await?;
    let mut open = letters
        .iter()
        .filter(|letter| letter.is_open())
        .filter(|letter| wanted.as_ref().is_none_or(|group| *group == letter.group));
    let Some(letter) = open.next() else {
        let what = format!("the event {id:?} has no open dead letter");
        return Err(Problem::not_found(what));
    };
    if open.next().is_some() {
        let what = "several groups gave up on the event";
        return Err(Problem::bad_request(what).hint("name the group"));
    }
    let text: Box<str> = edit.payload.into();
    let payload = bytes::Bytes::from(text.into_boxed_bytes());
    let receipt = state.bus().dead_letters().edit(letter, payload).await?;
    Ok(Answer(Edited {
        id: receipt.id().to_string(),
        edit_of: letter.event().id().to_string(),
    }))
}

/// The dead letters that a bulk operation would affect.
#[derive(Serialize, JsonSchema)]
struct Preview {
    /// How many open dead letters pass the filter.
    total: u64,
    /// The counts by group, type and error: the 100 largest.
    tallies: Vec<Tally>,
}

#[derive(Serialize, JsonSchema)]
struct Tally {
    group: String,
    event_type: String,
    error: String,
    count: u64,
}

async fn preview(
    State(state): State<AppState>,
    caller: Caller,
    Input(filter): Input<LetterFilter>,
) -> Result<Answer<Preview>, Problem> {
    let filter = filter.filter(&caller)?;
    let preview = state.bus().dead_letters().preview(filter).await?;
    Ok(Answer(shown(&caller, preview)))
}

fn shown(caller: &Caller, preview: DeadLetterPreview) -> Preview {
    let tallies = preview.tallies.into_iter().filter_map(|tally| {
        Some(Tally {
            group: group_shown(caller, &tally.group)?,
            event_type: tally.event_type,
            error: tally.error,
            count: tally.count,
        })
    });
    Preview {
        total: preview.total,
        tallies: tallies.collect(),
    }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Bulk {
    /// Which ones.
    filter: LetterFilter,
    /// The expected number of dead letters: `total` of a preview. The request is refused if it differs.
    #[serde(default)]
    expected: Option<u64>,
    /// At most this many per second; all at once unless given.
    #[serde(default)]
    rate: Option<u32>,
}

async fn retry_all(
    State(state): State<AppState>,
    caller: Caller,
    Input(bulk): Input<Bulk>,
) -> Result<Answer<Retried>, Problem> {
    let filter = bulk.filter.filter(&caller)?;
    let letters = state.bus().dead_letters();
    as_expected(&state, &filter, bulk.expected).await?;
    let retried = match bulk.rate {
        None => letters.retry_all(filter).await?,
        Some(rate) => letters.retry_slowly(filter, rate, |_| {}).await?,
    };
    Ok(Answer(Retried { retried }))
}

/// Refuses a bulk operation if the number of dead letters differs from the preview.
async fn as_expected(
    state: &AppState,
    filter: &DeadLetterFilter,
    expected: Option<u64>,
) -> Result<(), Problem> {
    let Some(expected) = expected else {
        return Ok(());
    };
    let found = state.bus().dead_letters().count(filter.clone()).await?;
    if found == expected {
        return Ok(());
    }
    let what = format!("{found} dead letters pass the filter, and {expected} were expected");
    Err(
        Problem::new(http::StatusCode::CONFLICT, "PreviewOutdated", what)
            .hint("look at the preview again"),
    )
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Purge {
    /// Which ones.
    filter: LetterFilter,
    /// The expected number of dead letters: `total` of a preview. The request is refused if it differs.
    #[serde(default)]
    expected: Option<u64>,
    /// Up to and including this time; now unless given.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    until: Option<Timestamp>,
    /// The time that `until` is compared with: `created` (when the event was received, the default) or `died`.
    #[serde(default)]
    by: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct PurgedCount {
    /// How many dead letters were deleted.
    purged: u64,
}

async fn purge(
    State(state): State<AppState>,
    caller: Caller,
    Input(purge): Input<Purge>,
) -> Result<Answer<PurgedCount>, Problem> {
    let filter = purge.filter.filter(&caller)?;
    let basis = match purge.by.as_deref() {
        None | Some("created") => PurgeBasis::Created,
        Some("died") => PurgeBasis::Died,
        Some(_) => return Err(Problem::bad_request("by is created or died")),
    };
    let until = purge.until.unwrap_or_else(|| SystemClock.now());
    as_expected(&state, &filter, purge.expected).await?;
    let letters = state.bus().dead_letters();
    let purged = letters.purge(until, basis, filter).await?;
    Ok(Answer(PurgedCount {
        purged: purged.dead_letters,
    }))
}
