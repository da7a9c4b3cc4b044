//! Drift check of one release.
//!
//! It reads each object. If the object has changed since it last passed a check, a dry-run apply of the manifest shows the
//! difference.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::{ORIGINALS_NAMESPACE, ObjectId};
use krypton_runtime::call::call;
use krypton_runtime::clock::BootTime;
use krypton_types::desired::drift::DriftMode;
use krypton_types::error_chain::chain;
use krypton_types::names::{DRIFT_ANNOTATION, DRIFT_IGNORE_ANNOTATION};
use kube::Client;
use kube::api::{GetParams, Patch, PatchParams, Request};
use serde_json::Value;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::difference::differences;
use super::kinds::{KindCache, ResourcePath};
use super::object;
use super::{
    Difference, DriftMetrics, DriftReport, DriftSettings, Finding, FindingOutcome, HELM, ignore,
};
use crate::drift::field_owner;
use crate::drift::heal_limit::HealLimiter;

/// Pause between two requests: ten requests a second, a small share of an API server's capacity.
const REQUEST_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of objects to check in one release. The largest charts have some hundreds.
const MAX_OBJECTS: usize = 4096;

type CheckResult<T = ()> = Result<T, CheckError>;

/// Reason why a check has no result. The next one may succeed.
#[derive(Debug)]
pub(crate) enum CheckError {
    /// The reconciler has another action for the Tenant, or the release has changed in the meantime.
    Cancelled,
    /// The revision cannot be decoded, or has changed since it was deployed.
    Unreadable(String),
    Failed(String),
}

impl<E: std::error::Error> From<E> for CheckError {
    fn from(error: E) -> Self {
        Self::Failed(chain(&error))
    }
}

/// Cache of a member between checks. Losing it costs only requests.
#[derive(Debug, Default)]
pub(crate) struct DriftCache {
    kinds: KindCache,
    releases: BTreeMap<ReleaseKey, ReleaseCache>,
}

impl DriftCache {
    /// Drops the releases for which `is_used` returns false.
    pub(crate) fn retain(&mut self, is_used: impl Fn(&ReleaseKey) -> bool) {
        self.releases.retain(|release, _| is_used(release));
    }
}

/// Cached state of a release.
#[derive(Debug, Default)]
struct ReleaseCache {
    /// Revision and rules that the hashes depend on.
    inputs: (u32, Vec<super::IgnoreRule>),
    /// Hashes of the objects that passed the last check: eight bytes each.
    passed: HashMap<ObjectIndex, u64>,
    heal_limiter: HealLimiter,
}

/// Index of an object in the manifest of one revision.
type ObjectIndex = u16;

/// A drift check of one revision.
#[derive(Debug)]
pub(crate) struct DriftCheck {
    pub(crate) release: ReleaseKey,
    pub(crate) revision: u32,
    pub(crate) settings: DriftSettings,
    pub(crate) cancel: CancellationToken,
    /// krypton-operator installed the revision. It created the objects that have no namespace in the manifest in
    /// `default`.
    pub(crate) adopted: bool,
}

impl DriftCheck {
    /// Returns true if the check still has the requested revision and settings.
    pub(crate) fn matches_request(
        &self,
        revision: Option<u32>,
        settings: Option<&DriftSettings>,
    ) -> bool {
        Some(self.revision) == revision && Some(&self.settings) == settings
    }
}

/// Input of a drift check.
pub(crate) struct CheckInput<'a> {
    pub(crate) check: &'a DriftCheck,
    /// Client with Helm's rights.
    pub(crate) client: &'a Client,
    pub(crate) metrics: &'a DriftMetrics,
    /// Krypton has recorded this manifest. The users of the workspace can write any other manifest, and its objects are
    /// read with Helm's rights. Without a record, the check covers only objects of the workspace and corrects none.
    pub(crate) recorded: bool,
    /// Returns true while the member may be written to.
    pub(crate) may_write: &'a (dyn Fn() -> bool + Send + Sync),
}

/// Checks the objects of a manifest and corrects differences if `settings` requests it.
pub(crate) async fn check_release(
    input: &CheckInput<'_>,
    cache: &mut DriftCache,
    manifest: &[Value],
) -> CheckResult<DriftReport> {
    let target = input.check;
    let mut cached = cache.releases.remove(&target.release).unwrap_or_default();
    let inputs = (target.revision, target.settings.rules.clone());
    if cached.inputs != inputs {
        cached.passed.clear();
        cached.inputs = inputs;
    }
    let mut pace = tokio::time::interval(REQUEST_PAUSE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    input.metrics.checks.inc();
    let mut check = ReleaseCheck {
        input,
        pace,
        kinds: &mut cache.kinds,
        queried_versions: BTreeSet::new(),
        cached,
        report: DriftReport {
            revision: target.revision,
            ..DriftReport::default()
        },
    };
    let mut result = Ok(());
    for (index, manifest) in (0..).zip(manifest.iter().take(MAX_OBJECTS)) {
        result = check.check_object(index, manifest).await;
        if result.is_err() {
            break;
        }
    }
    let ReleaseCheck { cached, report, .. } = check;
    if !(cached.passed.is_empty() && cached.heal_limiter.is_empty()) {
        cache.releases.insert(target.release.clone(), cached);
    }
    result.map(|()| report)
}

struct ReleaseCheck<'a> {
    input: &'a CheckInput<'a>,
    pace: Interval,
    kinds: &'a mut KindCache,
    /// Groups that were queried in this check. An unserved kind is not queried again.
    queried_versions: BTreeSet<String>,
    cached: ReleaseCache,
    report: DriftReport,
}

/// Response about one object.
enum ApiResponse<T> {
    Success(T),
    NotFound,
    /// Another client has written the object in the meantime.
    Conflict,
    /// The API server rejects the request.
    Rejected(String),
}

impl ReleaseCheck<'_> {
    async fn check_object(&mut self, index: ObjectIndex, manifest: &Value) -> CheckResult {
        let Some(mut id) = ObjectId::from_object(manifest) else {
            return Ok(());
        };
        let resource_path = match self.resource_path(&mut id).await? {
            Ok(resource_path) => resource_path,
            Err(reason) => {
                self.report.not_compared.push((id, reason));
                return Ok(());
            }
        };
        let workspace = &self.input.check.release.namespace;
        if !self.input.recorded && id.namespace.as_ref() != Some(workspace) {
            return Ok(());
        }
        // Try a second time if another client writes at the same time.
        for is_last_try in [false, true] {
            let live = match self.get(&resource_path, &id).await? {
                ApiResponse::Success(live) => Some(live),
                ApiResponse::NotFound => None,
                ApiResponse::Conflict => return Ok(()),
                ApiResponse::Rejected(reason) => {
                    self.report.not_compared.push((id, reason));
                    return Ok(());
                }
            };
            let Some(live) = live else {
                // A completed Job was cleaned up. Creating it again would run it again.
                if id.kind == "Job" && id.api_version.starts_with("batch/") {
                    return Ok(());
                }
                if self.exists_in_default(&id, manifest).await? {
                    return Ok(());
                }
                let finding = self.heal_deleted(&resource_path, id, manifest).await?;
                self.report.findings.push(finding);
                return Ok(());
            };
            let comparison_hash = object::comparison_hash(&live);
            if self.cached.passed.get(&index) == Some(&comparison_hash) {
                self.cached.heal_limiter.record_match(&id);
                return Ok(());
            }
            self.cached.passed.remove(&index);
            if is_excluded(&live) {
                return Ok(());
            }
            match self.compare(&resource_path, &id, manifest, &live).await? {
                Comparison::Equal => {
                    self.cached.passed.insert(index, comparison_hash);
                    self.cached.heal_limiter.record_match(&id);
                }
                Comparison::Differs(finding) => self.report.findings.push(finding),
                Comparison::NotCompared(reason) => self.report.not_compared.push((id, reason)),
                Comparison::Changed if !is_last_try => continue,
                Comparison::Changed => {}
            }
            return Ok(());
        }
        Ok(())
    }

    /// Returns true if krypton-operator created the missing object in `default`.
    async fn exists_in_default(&mut self, id: &ObjectId, manifest: &Value) -> CheckResult<bool> {
        let release = &self.input.check.release;
        let has_namespace =
            ObjectId::from_object(manifest).is_some_and(|id| id.namespace.is_some());
        if !self.input.check.adopted
            || has_namespace
            || id.namespace.is_none()
            || release.namespace == ORIGINALS_NAMESPACE
        {
            return Ok(false);
        }
        let mut id_in_default = ObjectId {
            namespace: Some(ORIGINALS_NAMESPACE.to_owned()),
            ..id.clone()
        };
        let Ok(resource_path) = self.resource_path(&mut id_in_default).await? else {
            return Ok(false);
        };
        Ok(match self.get(&resource_path, &id_in_default).await? {
            ApiResponse::Success(live) => object::belongs_to(&live, release),
            // The object may exist there, and a duplicate would help no user.
            ApiResponse::Rejected(_) => true,
            ApiResponse::NotFound | ApiResponse::Conflict => false,
        })
    }

    async fn compare(
        &mut self,
        resource_path: &Request,
        id: &ObjectId,
        manifest: &Value,
        live: &Value,
    ) -> CheckResult<Comparison> {
        let mut rules = ignore::built_in_rules(id, live);
        let ignored = live["metadata"]["annotations"][DRIFT_IGNORE_ANNOTATION].as_str();
        rules.extend(ignore::parse_rules(ignored.unwrap_or_default()).0);
        rules.extend(self.input.check.settings.rules.iter().cloned());
        rules.retain(|rule| rule.applies_to(id));
        let mut applied = object::applied(manifest, &self.input.check.release);
        for rule in &rules {
            ignore::copy_live_value(&mut applied, live, rule);
        }
        let params = PatchParams::apply(HELM).force().dry_run();
        let response = match self.apply(resource_path, id, &applied, &params).await? {
            ApiResponse::Success(response) => response,
            ApiResponse::NotFound | ApiResponse::Conflict => return Ok(Comparison::Changed),
            ApiResponse::Rejected(reason) => return Ok(Comparison::NotCompared(reason)),
        };
        let mut fields = differences(live, &response);
        fields.retain(|field| !rules.iter().any(|rule| rule.covers(field)));
        if fields.is_empty() {
            return Ok(Comparison::Equal);
        }
        let writer = field_owner::last_writer(live, &fields);
        let outcome = match object::other_release(live, &self.input.check.release) {
            Some(other) => {
                self.input.metrics.objects_found.inc();
                FindingOutcome::OtherRelease(other)
            }
            None => {
                let applied = object::with_live_identity(applied, live);
                match self.heal(resource_path, id, &applied, true).await? {
                    Some(outcome) => outcome,
                    None => return Ok(Comparison::Changed),
                }
            }
        };
        Ok(Comparison::Differs(Finding {
            object: id.clone(),
            difference: Difference::Fields(fields),
            writer,
            outcome,
        }))
    }

    async fn heal_deleted(
        &mut self,
        resource_path: &Request,
        id: ObjectId,
        manifest: &Value,
    ) -> CheckResult<Finding> {
        let applied = object::applied(manifest, &self.input.check.release);
        // Apply without force, to not take over an object that another client creates now.
        let healed = self.heal(resource_path, &id, &applied, false).await?;
        Ok(Finding {
            object: id,
            difference: Difference::Deleted,
            writer: None,
            outcome: healed.unwrap_or(FindingOutcome::ReportedOnly),
        })
    }

    /// Corrects an object if `settings` requests it. Returns `None` if the object has changed in the meantime.
    async fn heal(
        &mut self,
        resource_path: &Request,
        id: &ObjectId,
        applied: &Value,
        force: bool,
    ) -> CheckResult<Option<FindingOutcome>> {
        let metrics = self.input.metrics;
        let settings = &self.input.check.settings;
        if settings.mode != DriftMode::Heal || !self.input.recorded {
            metrics.objects_found.inc();
            return Ok(Some(FindingOutcome::ReportedOnly));
        }
        let interval = Duration::from_secs(settings.interval_seconds.into());
        let limiter = &mut self.cached.heal_limiter;
        if !limiter.may_heal(id, interval, BootTime::now()) {
            metrics.objects_found.inc();
            metrics.heals_held_back.inc();
            return Ok(Some(FindingOutcome::HeldBack));
        }
        if !(self.input.may_write)() {
            return Err(CheckError::Cancelled);
        }
        let params = PatchParams {
            force,
            ..PatchParams::apply(HELM)
        };
        let response = self.apply(resource_path, id, applied, &params).await?;
        if matches!(response, ApiResponse::Conflict) {
            return Ok(None);
        }
        metrics.objects_found.inc();
        self.cached.heal_limiter.record_heal(id, BootTime::now());
        Ok(Some(match response {
            ApiResponse::Success(_) => {
                metrics.heals.inc();
                tracing::info!(object = %id, namespace = %self.input.check.release.namespace, "corrected drift");
                FindingOutcome::Healed
            }
            ApiResponse::NotFound | ApiResponse::Conflict => {
                metrics.heals_failed.inc();
                FindingOutcome::Failed("its namespace or kind does not exist".to_owned())
            }
            ApiResponse::Rejected(reason) => {
                metrics.heals_failed.inc();
                FindingOutcome::Failed(reason)
            }
        }))
    }

    /// Returns the API path for objects of this kind, or the reason why it is unknown.
    async fn resource_path(&mut self, id: &mut ObjectId) -> CheckResult<Result<Request, String>> {
        let now = BootTime::now();
        if self.kinds.get(id, now).is_none() && self.queried_versions.insert(id.api_version.clone())
        {
            self.throttle().await?;
            let (client, version) = (self.input.client.clone(), id.api_version.clone());
            let attempt = format!("listing the kinds of {version}");
            let request = async {
                match version.contains('/') {
                    true => client.list_api_group_resources(&version).await,
                    false => client.list_core_api_resources(&version).await,
                }
            };
            let kinds = match send(attempt, request).await? {
                ApiResponse::Success(list) => list.resources,
                ApiResponse::NotFound | ApiResponse::Conflict => Vec::new(),
                ApiResponse::Rejected(reason) => return Ok(Err(reason)),
            };
            let kinds = kinds.into_iter().filter(|kind| !kind.name.contains('/'));
            let kinds = kinds.map(|kind| {
                let (plural, namespaced) = (kind.name, kind.namespaced);
                (kind.kind, ResourcePath { plural, namespaced })
            });
            self.kinds.insert(version, kinds.collect(), now);
        }
        let Some(ResourcePath { plural, namespaced }) = self.kinds.get(id, now).cloned() else {
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
            let namespace = id.namespace.take();
            namespace.unwrap_or_else(|| self.input.check.release.namespace.clone())
        });
        let path = match &id.namespace {
            Some(namespace) => format!("{base}/namespaces/{namespace}/{plural}"),
            None => format!("{base}/{plural}"),
        };
        Ok(Ok(Request::new(path)))
    }

    async fn get(
        &mut self,
        resource_path: &Request,
        id: &ObjectId,
    ) -> CheckResult<ApiResponse<Value>> {
        self.throttle().await?;
        let request = match resource_path.get(&id.name, &GetParams::default()) {
            Ok(request) => request,
            Err(error) => return Ok(ApiResponse::Rejected(error.to_string())),
        };
        let request = self.input.client.request::<Value>(request);
        send(format!("reading {id}"), request).await
    }

    async fn apply(
        &mut self,
        resource_path: &Request,
        id: &ObjectId,
        applied: &Value,
        params: &PatchParams,
    ) -> CheckResult<ApiResponse<Value>> {
        self.throttle().await?;
        let request = match resource_path.patch(&id.name, params, &Patch::Apply(applied)) {
            Ok(request) => request,
            Err(error) => return Ok(ApiResponse::Rejected(error.to_string())),
        };
        let request = self.input.client.request::<Value>(request);
        let attempt = format!("applying {id}");
        Ok(match send(attempt, request).await? {
            // The API server's message may quote a secret value.
            ApiResponse::Rejected(_) if id.kind == "Secret" => {
                ApiResponse::Rejected("the API server rejects the chart's content".to_owned())
            }
            response => response,
        })
    }

    /// Waits for the next request's slot, or fails if the check is cancelled. A request in flight always completes, so
    /// its result is known.
    async fn throttle(&mut self) -> CheckResult {
        let cancel = &self.input.check.cancel;
        tokio::select! {
            biased;
            () = cancel.cancelled() => Err(CheckError::Cancelled),
            _ = self.pace.tick() => {
                self.input.metrics.requests.inc();
                Ok(())
            }
        }
    }
}

enum Comparison {
    Equal,
    Differs(Finding),
    NotCompared(String),
    /// The object has changed in the meantime.
    Changed,
}

/// Returns true if the object is being deleted or a user disabled drift detection for it.
fn is_excluded(live: &Value) -> bool {
    let metadata = &live["metadata"];
    metadata.get("deletionTimestamp").is_some()
        || metadata["annotations"][DRIFT_ANNOTATION].as_str() == Some("off")
}

/// Sends the request and returns the response about the object. A failure of the API server ends the check.
async fn send<T>(
    attempt: String,
    request: impl Future<Output = kube::Result<T>>,
) -> CheckResult<ApiResponse<T>> {
    let error = match call(attempt, request).await {
        Ok(object) => return Ok(ApiResponse::Success(object)),
        Err(error) => error,
    };
    match error.status() {
        Some(status) if status.code == 404 => Ok(ApiResponse::NotFound),
        Some(status) if status.code == 409 => Ok(ApiResponse::Conflict),
        // Authentication failed, or the API server is overloaded or unavailable. A 500 can come from a failed
        // webhook or from an invalid manifest.
        Some(status) if !matches!(status.code, 401 | 429 | 501..) => {
            Ok(ApiResponse::Rejected(status.message.clone()))
        }
        _ => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
