//! Drift check of one release.
//!
//! It reads each object. If the object has changed since its last good check, a dry-run apply of the manifest shows the
//! difference.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::{ORIGINALS_NAMESPACE, ObjectId};
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::clock::BootTime;
use krypton_types::desired::drift::DriftMode;
use krypton_types::error_chain::chain;
use krypton_types::names::{DRIFT_ANNOTATION, DRIFT_IGNORE_ANNOTATION};
use kube::Client;
use kube::api::{GetParams, Patch, PatchParams, Request};
use serde_json::Value;
use thiserror::Error;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::difference::differences;
use super::kinds::{Kinds, Place};
use super::object;
use super::{Difference, DriftMetrics, Finding, HELM, Outcome, Seen, Wanted, ignore};
use crate::drift::field_owner;
use crate::drift::heal_limit::Guard;

/// Pause between two requests: ten requests a second, a small share of an API server's capacity.
const PACE: Duration = Duration::from_millis(100);
/// Maximum number of objects to check in one release. The largest charts have some hundreds.
const MOST: usize = 4096;

/// A check that failed. The next one may succeed.
#[derive(Debug, Error)]
pub(crate) enum LookError {
    /// The reconciler has another action for the Tenant.
    #[error("it was called off")]
    CalledOff,
    #[error(transparent)]
    Api(#[from] ApiError),
}

/// Cache of a member between checks. Losing it costs only requests.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    kinds: Kinds,
    releases: BTreeMap<ReleaseKey, Past>,
}

impl Notes {
    /// Drops the releases for which `there` returns false.
    pub(crate) fn keep(&mut self, there: impl Fn(&ReleaseKey) -> bool) {
        self.releases.retain(|release, _| there(release));
    }
}

/// Cached state of a release.
#[derive(Debug, Default)]
struct Past {
    /// Revision and rules that the marks depend on.
    of: (u32, Vec<super::Rule>),
    /// Marks of the objects that passed the last check: eight bytes each.
    good: HashMap<ObjectKey, u64>,
    guard: Guard,
}

/// Index of an object in the manifest of one revision.
type ObjectKey = u16;

/// Input of a drift check.
pub(crate) struct Task<'a> {
    /// Client with Helm's rights.
    pub(crate) client: &'a Client,
    pub(crate) release: &'a ReleaseKey,
    pub(crate) revision: u32,
    pub(crate) wanted: &'a Wanted,
    pub(crate) metrics: &'a DriftMetrics,
    pub(crate) cancel: &'a CancellationToken,
    /// krypton-operator installed the revision. It created the objects that have no namespace in the manifest in
    /// `default`.
    pub(crate) adopted: bool,
    /// Krypton has recorded this manifest. The users of the workspace can write any other manifest, and its objects are
    /// read with Helm's rights. Without a record, the check covers only objects of the workspace and corrects none.
    pub(crate) recorded: bool,
    /// Returns true while the member may be written to.
    pub(crate) may_write: &'a (dyn Fn() -> bool + Send + Sync),
}

/// Checks the objects of a manifest and corrects differences if `wanted` requests it.
pub(crate) async fn look(
    task: &Task<'_>,
    notes: &mut Notes,
    manifest: &[Value],
) -> Result<Seen, LookError> {
    let mut past = notes.releases.remove(task.release).unwrap_or_default();
    let of = (task.revision, task.wanted.rules.clone());
    if past.of != of {
        past.good.clear();
        past.of = of;
    }
    let mut pace = tokio::time::interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    task.metrics.checks.inc();
    let mut looker = Looker {
        task,
        pace,
        kinds: &mut notes.kinds,
        asked: BTreeSet::new(),
    };
    let mut seen = Seen {
        revision: task.revision,
        ..Seen::default()
    };
    let mut result = Ok(());
    for (place, manifest) in manifest.iter().take(MOST).enumerate() {
        let Ok(place) = ObjectKey::try_from(place) else {
            break;
        };
        if let Err(error) = looker.one(place, manifest, &mut past, &mut seen).await {
            result = Err(error);
            break;
        }
    }
    if !(past.good.is_empty() && past.guard.is_empty()) {
        notes.releases.insert(task.release.clone(), past);
    }
    result.map(|()| seen)
}

struct Looker<'a> {
    task: &'a Task<'a>,
    pace: Interval,
    kinds: &'a mut Kinds,
    /// Groups that were queried in this check. An unserved kind is not queried again.
    asked: BTreeSet<String>,
}

/// Response about one object.
enum Answer<T> {
    Is(T),
    NotFound,
    /// Another client has written the object in the meantime.
    Conflict,
    /// The API server rejects the request.
    Refused(String),
}

impl Looker<'_> {
    async fn one(
        &mut self,
        place: ObjectKey,
        manifest: &Value,
        past: &mut Past,
        seen: &mut Seen,
    ) -> Result<(), LookError> {
        let Some(mut id) = ObjectId::of(manifest) else {
            return Ok(());
        };
        let resource = match self.resource(&mut id).await? {
            Ok(resource) => resource,
            Err(why) => {
                seen.unseen.push((id, why));
                return Ok(());
            }
        };
        let workspace = &self.task.release.namespace;
        if !self.task.recorded && id.namespace.as_ref() != Some(workspace) {
            return Ok(());
        }
        // Try a second time if another client writes at the same time.
        for last in [false, true] {
            let live = match self.get(&resource, &id).await? {
                Answer::Is(live) => Some(live),
                Answer::NotFound => None,
                Answer::Conflict => return Ok(()),
                Answer::Refused(why) => {
                    seen.unseen.push((id, why));
                    return Ok(());
                }
            };
            let Some(live) = live else {
                // A completed Job was cleaned up. Creating it again would run it again.
                if id.kind == "Job" && id.api_version.starts_with("batch/") {
                    return Ok(());
                }
                if self.is_in_default(&id, manifest).await? {
                    return Ok(());
                }
                let applied = object::applied(manifest, self.task.release);
                let finding = self.deleted(&resource, &id, applied, past).await?;
                seen.findings.push(finding);
                return Ok(());
            };
            let mark = object::mark(&live);
            if past.good.get(&place) == Some(&mark) {
                past.guard.good(&id);
                return Ok(());
            }
            past.good.remove(&place);
            if left_alone(&live) {
                return Ok(());
            }
            match self.compared(&resource, &id, manifest, &live, past).await? {
                Compared::Good => {
                    past.good.insert(place, mark);
                    past.guard.good(&id);
                }
                Compared::Differs(finding) => seen.findings.push(finding),
                Compared::Unseen(why) => seen.unseen.push((id, why)),
                Compared::Changed if !last => continue,
                Compared::Changed => {}
            }
            return Ok(());
        }
        Ok(())
    }

    /// Returns true if krypton-operator created the missing object in `default`.
    async fn is_in_default(&mut self, id: &ObjectId, manifest: &Value) -> Result<bool, LookError> {
        let release = self.task.release;
        let placed = ObjectId::of(manifest).is_some_and(|id| id.namespace.is_some());
        if !self.task.adopted
            || placed
            || id.namespace.is_none()
            || release.namespace == ORIGINALS_NAMESPACE
        {
            return Ok(false);
        }
        let mut there = ObjectId {
            namespace: Some(ORIGINALS_NAMESPACE.to_owned()),
            ..id.clone()
        };
        let Ok(resource) = self.resource(&mut there).await? else {
            return Ok(false);
        };
        Ok(match self.get(&resource, &there).await? {
            Answer::Is(live) => object::is_of(&live, release),
            // The object may exist there, and a duplicate would help no user.
            Answer::Refused(_) => true,
            Answer::NotFound | Answer::Conflict => false,
        })
    }

    async fn compared(
        &mut self,
        resource: &Request,
        id: &ObjectId,
        manifest: &Value,
        live: &Value,
        past: &mut Past,
    ) -> Result<Compared, LookError> {
        let mut rules = ignore::well_known(id, live);
        let own = live.pointer("/metadata/annotations");
        let own = own.and_then(|own| own.get(DRIFT_IGNORE_ANNOTATION));
        rules.extend(ignore::read(own.and_then(Value::as_str).unwrap_or_default()).0);
        rules.extend(self.task.wanted.rules.iter().cloned());
        rules.retain(|rule| rule.is_for(id));
        let mut applied = object::applied(manifest, self.task.release);
        for rule in &rules {
            ignore::keep(&mut applied, live, rule);
        }
        let asked = Apply {
            dry_run: true,
            force: true,
        };
        let answer = match self.apply(resource, id, &applied, asked).await? {
            Answer::Is(answer) => answer,
            Answer::NotFound | Answer::Conflict => return Ok(Compared::Changed),
            Answer::Refused(why) => return Ok(Compared::Unseen(why)),
        };
        let mut fields = differences(live, &answer);
        fields.retain(|field| !rules.iter().any(|rule| rule.covers(field)));
        if fields.is_empty() {
            return Ok(Compared::Good);
        }
        let writer = field_owner::writer(live, &fields);
        let outcome = match object::other_release(live, self.task.release) {
            Some(other) => {
                self.task.metrics.found.inc();
                Outcome::NotOurs(other)
            }
            None => {
                let applied = object::onto(applied, live);
                match self.heal(resource, id, &applied, true, past).await? {
                    Some(outcome) => outcome,
                    None => return Ok(Compared::Changed),
                }
            }
        };
        Ok(Compared::Differs(Finding {
            object: id.clone(),
            difference: Difference::Fields(fields),
            writer,
            outcome,
        }))
    }

    async fn deleted(
        &mut self,
        resource: &Request,
        id: &ObjectId,
        applied: Value,
        past: &mut Past,
    ) -> Result<Finding, LookError> {
        // Apply without force, to not take over an object that another client creates now.
        let healed = self.heal(resource, id, &applied, false, past).await?;
        Ok(Finding {
            object: id.clone(),
            difference: Difference::Deleted,
            writer: None,
            outcome: healed.unwrap_or(Outcome::Left),
        })
    }

    /// Corrects an object if `wanted` requests it. Returns `None` if the object has changed in the meantime.
    async fn heal(
        &mut self,
        resource: &Request,
        id: &ObjectId,
        applied: &Value,
        force: bool,
        past: &mut Past,
    ) -> Result<Option<Outcome>, LookError> {
        let metrics = self.task.metrics;
        let wanted = self.task.wanted;
        if wanted.mode != DriftMode::Heal || !self.task.recorded {
            metrics.found.inc();
            return Ok(Some(Outcome::Left));
        }
        let interval = Duration::from_secs(wanted.interval_seconds.into());
        if !past.guard.may_heal(id, interval, BootTime::now()) {
            metrics.found.inc();
            metrics.held_back.inc();
            return Ok(Some(Outcome::HeldBack));
        }
        if !(self.task.may_write)() {
            return Err(LookError::CalledOff);
        }
        let written = Apply {
            dry_run: false,
            force,
        };
        let answer = self.apply(resource, id, applied, written).await?;
        if matches!(answer, Answer::Conflict) {
            return Ok(None);
        }
        metrics.found.inc();
        past.guard.healed(id, BootTime::now());
        Ok(Some(match answer {
            Answer::Is(_) => {
                metrics.healed.inc();
                tracing::info!(object = %id, namespace = %self.task.release.namespace, "corrected drift");
                Outcome::Healed
            }
            Answer::NotFound | Answer::Conflict => {
                metrics.failed.inc();
                Outcome::Failed("its namespace or its kind is gone".to_owned())
            }
            Answer::Refused(why) => {
                metrics.failed.inc();
                Outcome::Failed(why)
            }
        }))
    }

    /// Returns the API path for objects of this kind, or the reason why it is unknown.
    async fn resource(&mut self, id: &mut ObjectId) -> Result<Result<Request, String>, LookError> {
        let now = BootTime::now();
        if self.kinds.of(id, now).is_none() && self.asked.insert(id.api_version.clone()) {
            self.turn().await?;
            let (client, version) = (self.task.client.clone(), id.api_version.clone());
            let attempt = format!("listing the kinds of {version}");
            let request = async {
                match version.contains('/') {
                    true => client.list_api_group_resources(&version).await,
                    false => client.list_core_api_resources(&version).await,
                }
            };
            let listed = match answer(attempt, request).await? {
                Answer::Is(listed) => listed.resources,
                Answer::NotFound | Answer::Conflict => Vec::new(),
                Answer::Refused(why) => return Ok(Err(why)),
            };
            let listed = listed.into_iter().filter(|kind| !kind.name.contains('/'));
            let listed = listed.map(|kind| {
                let (plural, namespaced) = (kind.name, kind.namespaced);
                (kind.kind, Place { plural, namespaced })
            });
            self.kinds.keep(version, listed.collect(), now);
        }
        let Some(Place { plural, namespaced }) = self.kinds.of(id, now).cloned() else {
            return Ok(Err(format!(
                "the cluster has no kind {} in {}",
                id.kind, id.api_version
            )));
        };
        let base = match id.api_version.contains('/') {
            true => format!("/apis/{}", id.api_version),
            false => format!("/api/{}", id.api_version),
        };
        id.namespace = namespaced.then(|| {
            let own = id.namespace.take();
            own.unwrap_or_else(|| self.task.release.namespace.clone())
        });
        let path = match &id.namespace {
            Some(namespace) => format!("{base}/namespaces/{namespace}/{plural}"),
            None => format!("{base}/{plural}"),
        };
        Ok(Ok(Request::new(path)))
    }

    async fn get(&mut self, resource: &Request, id: &ObjectId) -> Result<Answer<Value>, LookError> {
        self.turn().await?;
        let request = match resource.get(&id.name, &GetParams::default()) {
            Ok(request) => request,
            Err(error) => return Ok(Answer::Refused(error.to_string())),
        };
        let request = self.task.client.request::<Value>(request);
        answer(format!("reading {id}"), request).await
    }

    async fn apply(
        &mut self,
        resource: &Request,
        id: &ObjectId,
        applied: &Value,
        how: Apply,
    ) -> Result<Answer<Value>, LookError> {
        self.turn().await?;
        let params = PatchParams {
            dry_run: how.dry_run,
            force: how.force,
            ..PatchParams::apply(HELM)
        };
        let request = match resource.patch(&id.name, &params, &Patch::Apply(applied)) {
            Ok(request) => request,
            Err(error) => return Ok(Answer::Refused(error.to_string())),
        };
        let request = self.task.client.request::<Value>(request);
        let attempt = format!("applying {id}");
        let answered = match how.dry_run {
            true => answer(attempt, request).await?,
            false => answer(attempt, request).await?,
        };
        Ok(match answered {
            // The API server's message may quote a secret value.
            Answer::Refused(_) if id.kind == "Secret" => {
                Answer::Refused("the API server rejects the chart's content".to_owned())
            }
            answer => answer,
        })
    }

    /// Waits for the next request's slot, or fails if the check is cancelled. A request in flight always completes, so
    /// its result is known.
    async fn turn(&mut self) -> Result<(), LookError> {
        let cancel = self.task.cancel;
        tokio::select! {
            biased;
            () = cancel.cancelled() => Err(LookError::CalledOff),
            _ = self.pace.tick() => {
                self.task.metrics.requests.inc();
                Ok(())
            }
        }
    }
}

enum Compared {
    Good,
    Differs(Finding),
    Unseen(String),
    /// The object has changed in the meantime.
    Changed,
}

#[derive(Clone, Copy)]
struct Apply {
    dry_run: bool,
    force: bool,
}

/// Returns true if the object is being deleted or a user disabled drift detection for it.
fn left_alone(live: &Value) -> bool {
    let meta = live.pointer("/metadata");
    let at = |key: &str| meta.and_then(|meta| meta.get(key));
    let set_aside = at("annotations").and_then(|annotations| annotations.get(DRIFT_ANNOTATION));
    at("deletionTimestamp").is_some() || set_aside.and_then(Value::as_str) == Some("off")
}

/// Returns a response about the object. A failure of the API server ends the check.
async fn answer<T>(
    attempt: String,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<Answer<T>, LookError> {
    let error = match call(attempt, request).await {
        Ok(answer) => return Ok(Answer::Is(answer)),
        Err(error) => error,
    };
    match error.status() {
        Some(status) if status.code == 404 => Ok(Answer::NotFound),
        Some(status) if status.code == 409 => Ok(Answer::Conflict),
        // Authentication failed, or the API server is overloaded or unavailable. A 500 can come from a failed
        // webhook or from an invalid manifest.
        Some(status) if !matches!(status.code, 401 | 429 | 501..) => {
            Ok(Answer::Refused(status.message.clone()))
        }
        _ => Err(error.into()),
    }
}

impl LookError {
    /// Returns the text for the log. The Tenant is not at fault.
    pub(crate) fn text(&self) -> String {
        chain(self)
    }
}

#[cfg(test)]
mod tests;
