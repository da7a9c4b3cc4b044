//! One action, carried out: every write states its precondition, every call has a deadline.

mod cert_manager;
mod leftovers;
mod occupants;
mod rollback;
mod stored;
mod telling;
mod trust;
mod unreadable;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_common::conditions::{ClusterState, reason};
use krypton_common::crd_policy::CrdPolicy;
use krypton_common::deployment::{Deed, DesiredDeployment};
use krypton_common::desired::{ChartState, DesiredState};
use krypton_common::error_chain::chain;
use krypton_common::names;
use krypton_common::tenant::Next;
use krypton_crds::tenant::Tenant;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{ObjectList, PartialObjectMeta};
use kube::{Client, CustomResourceExt, Resource, ResourceExt};
use serde_json::json;
use tempfile::TempPath;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tracing::Span;

use self::stored::Foreign;
use self::trust::compared;
use super::helm_queue::Ready;
use super::{Member, Tools};
use crate::access::{client_as, kubeconfig_as};
use crate::chart_crds::{self, ChartCrdError};
use crate::clock::{self, Boot};
use crate::effect;
use crate::events::{Events, Told};
use crate::fence::Hold;
use crate::helm::{HelmError, StopSignal, Uninstall, Upgrade, is_suspended};
use crate::index::{CREATOR_LABEL, CrdState, Revision, number};
use crate::newest::Newest as _;
use crate::plan::{self, Action, Attempt, Plan, Run, repair};
use crate::release::labels::{
    FINGERPRINT_LABEL, INSTALL_RUN, OWNER_NAMESPACE_LABEL, OWNER_UID_LABEL, RUN_LABEL, ReleaseKey,
    UPGRADE_RUN,
};
use crate::release::{self, Release, Status};
use crate::report::ReportBoard;
use crate::subject::{Subject, SubjectKey};
use crate::workspace_words::Words;

const DEADLINE: Duration = Duration::from_secs(10);

/// Whether an action runs Helm, and so holds a slot.
pub(super) fn runs_helm(action: &Action) -> bool {
    matches!(
        action,
        Action::Helm(_) | Action::InstallAgain | Action::Rollback(_) | Action::Uninstall
    )
}

/// Everything that one action needs, taken from the index at the time of the plan.
pub(super) struct Job {
    pub key: SubjectKey,
    pub subject: Subject,
    pub plan: Plan,
    /// What was told of it before.
    pub told: Option<ClusterState>,
    /// What comes next, as it is said with the plan's state.
    pub next: Option<Next>,
    pub release: ReleaseKey,
    pub newest: Option<Revision>,
    /// All of them, the newest too.
    pub revisions: Vec<Revision>,
    pub workspace_exists: bool,
    /// Whether the cluster has Tenants at all.
    pub tenants: CrdState,
    /// No other Tenant or deployment is to stay on this member.
    pub last: bool,
    pub desired: Arc<DesiredState>,
    /// The fingerprint of the chart for this Tenant or deployment.
    pub fingerprint: Arc<str>,
    /// The member could be written to when this was planned.
    pub permitted: bool,
    /// The slot and the chart of a run of Helm.
    pub ready: Option<Ready>,
    /// Given back with the job; it has none if it holds a slot.
    #[expect(dead_code, reason = "it is held, not read")]
    pub turn: Option<OwnedSemaphorePermit>,
}

impl Job {
    /// The chart for this Tenant or deployment.
    fn chart(&self) -> Cow<'_, ChartState> {
        self.desired.chart_with(self.subject.values())
    }
}

/// What came of it.
pub(super) struct Done {
    pub key: SubjectKey,
    pub of: ReleaseKey,
    pub attempt: Attempt,
    /// What was said of the Tenant on the way.
    pub said: Option<ClusterState>,
    /// The same, when it was with the Lease: written, and its events told.
    pub told: Option<ClusterState>,
    /// And this with it.
    pub next: Option<Next>,
    pub tenant: Option<Tenant>,
    pub release: Option<ReleaseNews>,
    pub facts: Option<Release>,
    /// As in the memory of the plan.
    pub unrecorded: Option<(u32, bool)>,
    pub workspace: Option<ObjectMeta>,
    pub applied: Option<Run>,
    /// The Tenant's UID, if it was found deleted while its CRD was whole.
    pub deletion_confirmed: Option<String>,
    /// The deployment's UID, if nothing of it is left to be done.
    pub let_go: Option<String>,
    /// What failed before is over.
    pub progressed: bool,
    /// The job only reported the state.
    pub spoke: bool,
    /// The action stopped because it needs a slot of Helm.
    pub needs_slot: bool,
    pub fault: Option<Fault>,
}

/// What was read of a release's Secrets.
pub(super) enum ReleaseNews {
    /// All of them, afresh.
    All {
        metas: Vec<ObjectMeta>,
        version: u64,
    },
    /// One, which the facts are of where it could be decoded.
    One(Box<ObjectMeta>),
}

/// Why an action did not succeed.
#[derive(Debug)]
pub(super) enum Fault {
    /// To be shown, and tried again after a back-off; `permanent` when only a change can help.
    Shown {
        reason: &'static str,
        message: String,
        permanent: bool,
    },
    /// The plan rests on something that has changed: plan anew in a moment.
    Stale,
    /// The apiserver did not take it; not the Tenant's fault.
    Passing(String),
    /// The API server refuses the request itself; a retry alone does not help.
    Refused(String),
}

impl Fault {
    /// For metrics.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::Shown { .. } => "failed",
            Self::Stale => "stale",
            Self::Passing(_) | Self::Refused(_) => "passing",
        }
    }
}

/// The hands of a reconciler.
#[derive(Clone)]
pub(super) struct Performer {
    /// While an action of an object with a service account is performed, with that one's rights.
    pub member: Arc<Member>,
    /// With the rights that helm has, whoever it acts as: for what is the chart's and no tenant's.
    pub fleet_client: Client,
    /// What is wanted now, of which a job has what was wanted when it was planned.
    pub desired: watch::Receiver<Arc<DesiredState>>,
    pub tools: Tools,
    pub events: Events,
    pub board: Arc<ReportBoard>,
    pub hold: watch::Receiver<Hold>,
    pub stop: StopSignal,
}

impl Performer {
    pub(super) async fn perform(self: Arc<Self>, mut job: Box<Job>) -> Box<Done> {
        let ready = job.ready.take();
        let mut done = Box::new(Done {
            key: job.key.clone(),
            of: job.release.clone(),
            attempt: Attempt::of(&job.subject, &job.desired, &job.fingerprint),
            said: None,
            told: None,
            next: job.next,
            tenant: None,
            release: None,
            facts: None,
            unrecorded: None,
            workspace: None,
            applied: None,
            deletion_confirmed: None,
            let_go: None,
            progressed: false,
            spoke: job.plan.action == Action::Nothing,
            needs_slot: false,
            fault: None,
        });
        let begun = Boot::now();
        // Removed once the action is over.
        let (performer, _kubeconfig) = match self.acting_for(&job) {
            Ok((performer, kubeconfig)) => (performer, kubeconfig),
            Err(fault) => {
                done.fault = Some(fault);
                return done;
            }
        };
        Box::pin(performer.act(&job, ready, &mut done, begun)).await;
        done
    }

    /// Acts as the object's service account, where it has one.
    fn acting_for(self: Arc<Self>, job: &Job) -> Result<(Arc<Self>, Option<TempPath>), Fault> {
        let user = job.subject.user(&job.desired.lockdown);
        let Some(user) = user.filter(|_| job.plan.action != Action::Nothing) else {
            return Ok((self, None));
        };
        let client = client_as(&self.member.client, &user).map_err(|_| Fault::Shown {
            reason: reason::HELM_UNAVAILABLE,
            message: "spec.serviceAccountName is not the name of a service account; correct it"
                .to_owned(),
            permanent: true,
        })?;
        let kubeconfig = kubeconfig_as(&self.member.kubeconfig, &user);
        let kubeconfig = kubeconfig.map_err(|error| Fault::Shown {
            reason: reason::HELM_UNAVAILABLE,
            message: format!(
                "writing the kubeconfig of helm failed: {error}; is --private-dir full?"
            ),
            permanent: false,
        })?;
        let member = Member {
            helm_client: client,
            kubeconfig: kubeconfig.to_path_buf(),
            ..(*self.member).clone()
        };
        let performer = Self {
            member: Arc::new(member),
            ..(*self).clone()
        };
        Ok((Arc::new(performer), Some(kubeconfig)))
    }

    async fn act(&self, job: &Job, ready: Option<Ready>, done: &mut Done, begun: Boot) {
        let result = match &job.plan.action {
            Action::Nothing => self.say(job, done).await,
            Action::AddFinalizer => self.add_finalizer(job, done).await,
            Action::CreateWorkspace => self.create_workspace(job, done).await,
            Action::ReadRelease(revision) => self.read_release(job, *revision, ready, done).await,
            Action::Unlock { revision, was } => {
                let lock = (*revision, &**was);
                self.unlock(job, lock, ready, done).await
            }
            Action::Helm(run) => self.helm(job, *run, false, ready, done).await,
            Action::InstallAgain => self.helm(job, Run::Install, true, ready, done).await,
            Action::Sweep(revision) => self.sweep(job, *revision, done).await,
            Action::SweepDefault(revision) => self.sweep_default(job, *revision, done).await,
            Action::Rollback(to) => self.roll_back(job, *to, ready, done).await,
            Action::Uninstall => self.uninstall(job, ready, done).await,
            Action::Annotate => self.annotate(job, done).await,
            Action::DeleteWorkspace => self.delete_workspace(job, done).await,
            Action::RemoveFinalizer { orphaned } => {
                self.remove_finalizer(job, *orphaned, done).await
            }
        };
        done.fault = result.err();
        let outcome = done.fault.as_ref().map_or("ok", Fault::outcome);
        Span::current().record("outcome", outcome);
        let took = Boot::now().since(begun);
        let work = &self.tools.work;
        work.reconciled(&job.plan.action, took, outcome);
    }

    fn client(&self) -> Client {
        self.member.client.clone()
    }

    fn tenants(&self, namespace: &str) -> Api<Tenant> {
        Api::namespaced(self.client(), namespace)
    }

    /// An event on the Tenant. Of a deployment home tells, out of the reports.
    pub(super) fn tell(&self, subject: &Subject, told: Told) {
        match subject {
            Subject::Tenant(tenant) => self.events.tell(tenant.object_ref(&()), told),
            Subject::Deployment(order) => {
                let deed = Deed {
                    at: u64::try_from(clock::wall().as_nanosecond()).unwrap_or_default(),
                    reason: told.reason.to_owned(),
                    message: told.message,
                };
                self.board.did(order, deed);
            }
        }
    }

    fn secrets(&self, release: &ReleaseKey) -> Api<Secret> {
        Api::namespaced(self.client(), &release.namespace)
    }

    async fn patch_tenant(
        &self,
        tenant: &Tenant,
        done: &Done,
        mut metadata: serde_json::Value,
    ) -> kube::Result<Tenant> {
        let newest = done.tenant.as_ref().unwrap_or(tenant);
        metadata["resourceVersion"] = json!(newest.metadata.resource_version);
        let patch = json!({ "metadata": metadata });
        let api = self.tenants(&newest.namespace().unwrap_or_default());
        let params = PatchParams::default();
        let patch = Patch::Merge(&patch);
        api.patch(&newest.name_any(), &params, &patch).await
    }

    async fn add_finalizer(&self, job: &Job, done: &mut Done) -> Result<(), Fault> {
        let Subject::Tenant(tenant) = &job.subject else {
            return Ok(());
        };
        if job.workspace_exists {
            let message = format!("namespace {} exists", job.release.namespace);
            let told = Told {
                warning: false,
                reason: "WorkspaceExists",
                message,
            };
            self.tell(&job.subject, told);
        }
        let mut finalizers = tenant.finalizers().to_vec();
        finalizers.push(names::TENANT_FINALIZER.to_owned());
        let call = self.patch_tenant(tenant, done, json!({ "finalizers": finalizers }));
        let call = in_time("adding the finalizer", effect!("finalizer.add", call));
        done.tenant = Some(call.await?);
        Ok(())
    }

    async fn remove_finalizer(
        &self,
        job: &Job,
        orphaned: bool,
        done: &mut Done,
    ) -> Result<(), Fault> {
        // Once it is off, nobody uninstalls what a list that was not whole has left out.
        if !orphaned && job.newest.is_none() {
            self.relist(job, done).await?;
            if matches!(&done.release, Some(ReleaseNews::All { metas, .. }) if !metas.is_empty()) {
                return Err(Fault::Stale);
            }
        }
        if !orphaned {
            self.delete_cert_manager_crds(job).await?;
            self.delete_record(job).await?;
        }
        let tenant = match &job.subject {
            Subject::Tenant(tenant) => tenant,
            // The next report says that it is gone, and home's finalizer goes by that.
            Subject::Deployment(order) => {
                done.let_go = Some(order.uid.clone());
                return Ok(());
            }
        };
        let mut finalizers = tenant.finalizers().to_vec();
        finalizers.retain(|finalizer| finalizer != names::TENANT_FINALIZER);
        if orphaned {
            let message = job.plan.state.ready.message.clone();
            self.tell(
                &job.subject,
                Told {
                    warning: true,
                    reason: "Orphaned",
                    message,
                },
            );
        }
        let mut metadata = json!({ "finalizers": finalizers });
        // It would hand a release that others make there to a Tenant that stays.
        if job.desired.retire && !orphaned {
            let annotation = names::fingerprint_annotation(&self.member.name);
            metadata["annotations"] = json!({ annotation: null });
        }
        let call = self.patch_tenant(tenant, done, metadata);
        let call = in_time("removing the finalizer", effect!("finalizer.remove", call));
        done.tenant = Some(call.await?);
        Ok(())
    }

    async fn annotate(&self, job: &Job, done: &mut Done) -> Result<(), Fault> {
        self.say(job, done).await?;
        let Subject::Tenant(tenant) = &job.subject else {
            return Ok(());
        };
        let chart = &job.desired.chart;
        let fingerprint =
            krypton_common::fingerprint::original(&chart.repo, &chart.name, &chart.version);
        let annotation = names::fingerprint_annotation(&self.member.name);
        let metadata = json!({ "annotations": { annotation: fingerprint } });
        let call = self.patch_tenant(tenant, done, metadata);
        let call = in_time("annotating the Tenant", effect!("tenant.annotate", call));
        done.tenant = Some(call.await?);
        Ok(())
    }

    async fn create_workspace(&self, job: &Job, done: &mut Done) -> Result<(), Fault> {
        let uid = job.subject.uid().to_owned();
        let marks = [
            (CREATOR_LABEL.to_owned(), uid),
            (names::MANAGED_BY_LABEL.to_owned(), "krypton".to_owned()),
        ];
        let words = Words {
            labels: marks.into(),
            annotations: BTreeMap::new(),
        };
        let words = words.given(&job.desired.namespaces);
        let namespace = Namespace {
            metadata: ObjectMeta {
                name: Some(job.release.namespace.clone()),
                labels: Some(words.labels),
                annotations: (!words.annotations.is_empty()).then_some(words.annotations),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        let api: Api<Namespace> = Api::all(self.client());
        let params = PostParams::default();
        match in_time(
            "creating the workspace",
            effect!("workspace.create", api.create(&params, &namespace)),
        )
        .await
        {
            Ok(created) => {
                done.workspace = Some(created.metadata);
                done.progressed = true;
                let message = format!("created namespace {}", job.release.namespace);
                let told = Told {
                    warning: false,
                    reason: "WorkspaceCreated",
                    message,
                };
                self.tell(&job.subject, told);
                Ok(())
            }
            // It is there after all, and not ours. The watch may have shown it long ago, to who did not see it.
            Err(Fault::Stale) => {
                let name = &job.release.namespace;
                let there = in_time("reading the workspace", api.get_metadata(name)).await?;
                done.workspace = Some(there.metadata);
                Ok(())
            }
            Err(fault) => {
                let message = format!(
                    "creating namespace {}: {}",
                    job.release.namespace,
                    fault.text()
                );
                let told = Told {
                    warning: true,
                    reason: "WorkspaceCreateFailed",
                    message: message.clone(),
                };
                self.tell(&job.subject, told);
                Err(Fault::Shown {
                    reason: reason::INSTALL_FAILED,
                    message,
                    permanent: false,
                })
            }
        }
    }

    async fn read_release(
        &self,
        job: &Job,
        revision: u32,
        ready: Option<Ready>,
        done: &mut Done,
    ) -> Result<(), Fault> {
        let Some(secret) = self.revision_secret(&job.release, revision).await? else {
            return self.relist(job, done).await;
        };
        let facts = match release::decode(&secret) {
            Ok(facts) => facts,
            // Without a permit, or while paused, reading must not lead to a write.
            Err(error)
                if self.still_permitted().is_err()
                    || plan::paused(&job.subject, &job.desired).is_some() =>
            {
                return Err(Fault::Passing(chain(&error)));
            }
            Err(error) => return self.set_aside(job, &secret, &error, ready, done).await,
        };
        let record = self.release_record(&job.release).await?;
        let recorded = trust::check_unchanged(&job.release, &record, &secret)?;
        done.unrecorded = (!recorded).then_some((revision, job.permitted));
        done.facts = Some(facts);
        done.release = Some(ReleaseNews::One(Box::new(secret.metadata)));
        Ok(())
    }

    async fn revision_secret(
        &self,
        release: &ReleaseKey,
        revision: u32,
    ) -> Result<Option<Secret>, Fault> {
        let name = release::secret_name(&release.name, revision);
        in_time("reading the release", self.secrets(release).get_opt(&name)).await
    }

    /// Reads the release's Secrets afresh, without their content.
    async fn relist(&self, job: &Job, done: &mut Done) -> Result<(), Fault> {
        let labels = format!("owner=helm,name={}", job.release.name);
        let of_helm = format!("type={}", release::SECRET_TYPE);
        let params = ListParams::default().labels(&labels).fields(&of_helm);
        let api = self.secrets(&job.release);
        let list: ObjectList<PartialObjectMeta<Secret>> = in_time(
            "listing the release's revisions",
            api.list_metadata(&params),
        )
        .await?;
        let version = number(list.metadata.resource_version.as_deref());
        // Like the watch: a Secret may bear the labels without being a revision.
        let is_one = |meta: &ObjectMeta| {
            Revision::of(meta).is_some_and(|(release, _)| release == job.release)
        };
        let metas = list.items.into_iter().map(|item| item.metadata);
        let metas = metas.filter(is_one).collect();
        done.release = Some(ReleaseNews::All { metas, version });
        Ok(())
    }

    async fn unlock(
        &self,
        job: &Job,
        (revision, was): (u32, &str),
        ready: Option<Ready>,
        done: &mut Done,
    ) -> Result<(), Fault> {
        let Some(secret) = self.revision_secret(&job.release, revision).await? else {
            return self.relist(job, done).await;
        };
        let description = format!("Unlocked by Krypton: left {was} by a helm that is gone");
        let mut unlocked = match release::unlocked(&secret, &description) {
            Ok(unlocked) => unlocked,
            Err(error) => return self.set_aside(job, &secret, &error, ready, done).await,
        };
        // What once was installed is not to pass for an installation that failed.
        if was != Status::PendingInstall.as_str()
            && let Some(labels) = &mut unlocked.metadata.labels
        {
            labels.retain(|label, run| label != RUN_LABEL || !run.starts_with(INSTALL_RUN));
        }
        let name = unlocked.name_any();
        let api = self.secrets(&job.release);
        let params = PostParams::default();
        in_time(
            "unlocking the release",
            effect!("release.unlock", api.replace(&name, &params, &unlocked)),
        )
        .await?;
        let message = format!("revision {revision} was left {was} by a helm that is gone");
        self.tell(
            &job.subject,
            Told {
                warning: true,
                reason: "ReleaseUnlocked",
                message,
            },
        );
        self.relist(job, done).await
    }

    async fn helm(
        &self,
        job: &Job,
        run: Run,
        again: bool,
        ready: Option<Ready>,
        done: &mut Done,
    ) -> Result<(), Fault> {
        let Some((ready, path)) = ready.and_then(Ready::with_chart) else {
            return Err(Fault::Stale);
        };
        let why = match run {
            Run::Install => reason::INSTALL_FAILED,
            Run::Upgrade => reason::UPGRADE_FAILED,
        };
        let chart = job.chart();
        self.still_permitted()?;
        let server_side = match &job.newest {
            None => true,
            Some(newest) => match self.revision_secret(&job.release, newest.revision).await? {
                Some(secret) => match release::decode(&secret) {
                    Ok(facts) => facts.server_side,
                    Err(error) => {
                        let ready = Some(ready);
                        return self.set_aside(job, &secret, &error, ready, done).await;
                    }
                },
                None => return self.relist(job, done).await,
            },
        };
        if again {
            self.forget_older_attempts(job, done).await?;
        }
        if run == Run::Upgrade {
            self.forget_repeated_attempts(job, done).await?;
        }
        let values = chart.helm_values();
        let begins = self.tools.helm.ready(&self.member.name, &values).await;
        begins.map_err(|error| unavailable(&error))?;
        self.say(job, done).await?;
        if run == Run::Upgrade && job.desired.chart_crds == CrdPolicy::CreateReplace {
            self.replace_crds(&path, why).await?;
        }
        let kind = if run == Run::Install && repair::begins_anew(&job.revisions) {
            INSTALL_RUN
        } else {
            UPGRADE_RUN
        };
        let id = format!("{kind}{:016x}", rand::random::<u64>());
        let upgrade = Upgrade {
            kubeconfig: self.member.kubeconfig.clone(),
            release: job.release.name.clone(),
            namespace: job.release.namespace.clone(),
            chart: path,
            values,
            secret_paths: chart.secret_paths().to_vec(),
            labels: [
                (FINGERPRINT_LABEL.to_owned(), chart.fingerprint()),
                (OWNER_UID_LABEL.to_owned(), job.subject.uid().to_owned()),
                (
                    OWNER_NAMESPACE_LABEL.to_owned(),
                    job.subject.namespace().to_owned(),
                ),
                (RUN_LABEL.to_owned(), id.clone()),
            ]
            .into(),
            timeout: self.member.policy.helm_timeout,
            server_side,
            skip_crds: job.desired.chart_crds == CrdPolicy::Skip,
            history_max: repair::history(
                self.member.policy.history_max,
                &job.revisions,
                &chart.fingerprint(),
            ),
            description: format!("Krypton, desired state {}", job.desired.version),
            again,
            cache_key: self.member.name.clone(),
        };
        // Another attempt to install compares with nothing that is stored.
        let compared = compared(job).filter(|_| !again);
        let foreign = match compared {
            Some(_) => Foreign::Remove,
            None => Foreign::Keep,
        };
        let stored = match self.stored(job, compared.as_slice(), foreign, done).await? {
            Ok(stored) => stored,
            Err(unreadable) => {
                let (secret, error) = *unreadable;
                let ready = Some(ready);
                return self.set_aside(job, &secret, &error, ready, done).await;
            }
        };
        if let Some(compared) = compared {
            let secret = stored.revision(compared).ok_or(Fault::Stale)?;
            self.check_compared(job, &stored.record, secret).await?;
        }
        self.check_again(job, &stored).await?;
        let record = stored.record;
        tracing::info!(member = %self.member.name, chart = %chart.applied_name(), ?run, "running helm");
        let expected = job.newest.as_ref().map_or(0, |newest| newest.revision) + 1;
        let running = Box::pin(self.tools.helm.upgrade(ready.slot, &upgrade, &self.stop));
        let ended = match run {
            Run::Install => {
                let running = effect!("helm.install", running);
                self.telling(job, done, expected, running).await
            }
            Run::Upgrade => {
                let running = effect!("helm.upgrade", running);
                self.telling(job, done, expected, running).await
            }
        };
        // The exit code is a hint; the release Secret is the truth (helm.md §8).
        let secret = self.revision_secret(&job.release, expected).await?;
        let facts = secret
            .as_ref()
            .and_then(|secret| release::decode(secret).ok());
        let written = secret
            .as_ref()
            .and_then(|secret| Revision::of(&secret.metadata));
        let deployed = written.as_ref().is_some_and(|(_, revision)| {
            revision.status == Status::Deployed && revision.run.as_deref() == Some(&id)
        });
        if deployed {
            let stored = secret.as_ref().and_then(|it| release::digest(it).ok());
            if let Ok(Some(digest)) = &ended {
                self.put_on_record(job, expected, digest, record).await;
                // An undecodable Secret is set aside by the next pass.
                if facts.is_some() && stored.as_ref() != Some(digest) {
                    return Err(trust::tampered(&job.release, expected));
                }
            }
            done.release = secret.map(|secret| ReleaseNews::One(Box::new(secret.metadata)));
            done.facts = facts;
            done.applied = Some(run);
            done.progressed = true;
            tracing::info!(member = %self.member.name, revision = expected, "deployed");
            return Ok(());
        }
        self.relist(job, done).await?;
        let error = match ended {
            Ok(_) => {
                let message = format!(
                    "helm ended well, but revision {expected} of release {} is not deployed",
                    job.release.name
                );
                return Err(Fault::Shown {
                    reason: why,
                    message,
                    permanent: false,
                });
            }
            Err(HelmError::Stopped) => return Err(Fault::Stale),
            Err(error) if error.is_local() => return Err(unavailable(&error)),
            Err(HelmError::Suspended { complaint }) => return Err(suspended(complaint)),
            Err(error) => error,
        };
        let permanent = error.is_permanent();
        Err(Fault::Shown {
            reason: why,
            message: chain(&error),
            permanent,
        })
    }

    async fn replace_crds(&self, chart: &Path, why: &'static str) -> Result<(), Fault> {
        let failed = |error: ChartCrdError| match error {
            ChartCrdError::NotPermitted => Fault::Stale,
            error => Fault::Shown {
                reason: why,
                message: chain(&error),
                permanent: false,
            },
        };
        let path = chart.to_owned();
        let reading = tokio::task::spawn_blocking(move || chart_crds::of_chart(&path));
        let crds = reading.await.map_err(|_| Fault::Stale)?.map_err(failed)?;
        let permitted = || self.still_permitted().is_ok();
        let replacing = chart_crds::replace(&self.fleet_client, &crds, permitted);
        Box::pin(replacing).await.map_err(failed)
    }

    async fn uninstall(
        &self,
        job: &Job,
        ready: Option<Ready>,
        done: &mut Done,
    ) -> Result<(), Fault> {
        let Some(ready) = ready else {
            return Err(Fault::Stale);
        };
        self.still_permitted()?;
        self.confirm_deletion(job).await?;
        if job.subject.is_going() {
            done.deletion_confirmed = job.subject.tenant().and_then(|tenant| tenant.uid());
        }
        if job.subject.is_going() || job.desired.retire {
            self.say(job, done).await?;
        }
        let newest = job.newest.as_ref().map_or(0, |newest| newest.revision);
        let stored = match self.stored(job, &[newest], Foreign::Keep, done).await? {
            Ok(stored) => stored,
            // Helm passes over what it cannot decode, and would go by the revision before without a word.
            Err(unreadable) => {
                let (secret, error) = *unreadable;
                let ready = Some(ready);
                return self.set_aside(job, &secret, &error, ready, done).await;
            }
        };
        self.sweep_before_uninstall(job).await?;
        let hooks = self.check_uninstall(job, &stored, done).await?;
        // The deletions announce the run, so it takes place at another time.
        if self.leave_only(job, &stored, newest).await? {
            self.relist(job, done).await?;
            return Err(Fault::Stale);
        }
        if hooks {
            self.wait_unannounced().await;
        }
        self.check_again(job, &stored).await?;
        self.still_permitted()?;
        let uninstall = Uninstall {
            kubeconfig: self.member.kubeconfig.clone(),
            release: job.release.name.clone(),
            namespace: job.release.namespace.clone(),
            timeout: self.member.policy.helm_timeout,
            hooks,
            cache_key: self.member.name.clone(),
        };
        tracing::info!(member = %self.member.name, "running helm uninstall");
        let running = Box::pin(
            self.tools
                .helm
                .uninstall(ready.slot, &uninstall, &self.stop),
        );
        let running = effect!("helm.uninstall", running);
        let ended = self.telling(job, done, newest, running).await;
        self.relist(job, done).await?;
        let gone =
            matches!(&done.release, Some(ReleaseNews::All { metas, .. }) if metas.is_empty());
        match ended {
            _ if gone => {
                done.progressed = true;
                let message = format!("uninstalled release {}", job.release.name);
                let told = Told {
                    warning: false,
                    reason: "HelmUninstalled",
                    message,
                };
                self.tell(&job.subject, told);
                Ok(())
            }
            Err(HelmError::Stopped) => Err(Fault::Stale),
            Err(error) if error.is_local() => Err(unavailable(&error)),
            Err(HelmError::Suspended { complaint }) => Err(suspended(complaint)),
            Ok(()) => Err(Fault::Shown {
                reason: reason::UNINSTALL_FAILED,
                message: format!(
                    "release {} is still there after helm uninstall",
                    job.release.name
                ),
                permanent: false,
            }),
            Err(error) => {
                let message = chain(&error);
                let told = Told {
                    warning: true,
                    reason: "HelmUninstallFailed",
                    message: message.clone(),
                };
                self.tell(&job.subject, told);
                let permanent = error.is_permanent();
                Err(Fault::Shown {
                    reason: reason::UNINSTALL_FAILED,
                    message,
                    permanent,
                })
            }
        }
    }

    /// Design §3, rule 2: a deletion is read twice, and one that comes with the CRD's is none.
    async fn confirm_deletion(&self, job: &Job) -> Result<(), Fault> {
        match &job.subject {
            Subject::Tenant(tenant) => self.confirm_tenants_deletion(tenant).await,
            Subject::Deployment(order) => {
                let confirmed = still_ordered(order, job.desired.retire, &self.desired.get());
                confirmed.then_some(()).ok_or(Fault::Stale)
            }
        }
    }

    async fn confirm_tenants_deletion(&self, tenant: &Tenant) -> Result<(), Fault> {
        let crds: Api<CustomResourceDefinition> = Api::all(self.client());
        let crd = in_time("reading the CRD", crds.get_metadata(Tenant::crd_name())).await?;
        if crd.metadata.deletion_timestamp.is_some() {
            return Err(Fault::Stale);
        }
        let times = [
            tenant.metadata.deletion_timestamp.as_ref(),
            crd.metadata.creation_timestamp.as_ref(),
        ];
        if let [Some(deleted), Some(made)] = times.map(|time| time.map(|time| time.0))
            && deleted < made
        {
            return Err(Fault::Shown {
                reason: reason::UNINSTALL_FAILED,
                message: with_a_former_crd(),
                permanent: true,
            });
        }
        let api = self.tenants(&tenant.namespace().unwrap_or_default());
        let reading = api.get_metadata(tenant.metadata.name.as_deref().unwrap_or_default());
        let fresh = in_time("reading the Tenant again", reading).await?;
        let same = fresh.metadata.uid == tenant.metadata.uid
            && fresh.metadata.deletion_timestamp.is_some()
                == tenant.metadata.deletion_timestamp.is_some();
        // Of one that is not deleted nothing says that it is to go but the order: it may have been taken
        // back while this waited for its turn.
        let annotated =
            |name: &str| fresh.annotations().get(name) == tenant.annotations().get(name);
        let ordered = fresh.metadata.deletion_timestamp.is_some() || {
            let now = self.desired.get();
            now.retire
                && !now.paused
                && annotated(names::ORPHAN_ANNOTATION)
                && annotated(names::PAUSED_ANNOTATION)
        };
        let same = same && ordered;
        if same { Ok(()) } else { Err(Fault::Stale) }
    }

    async fn delete_workspace(&self, job: &Job, done: &mut Done) -> Result<(), Fault> {
        self.say(job, done).await?;
        let api: Api<Namespace> = Api::all(self.client());
        let name = &job.release.namespace;
        let Some(fresh) = in_time("reading the workspace", api.get_opt(name)).await? else {
            return Ok(());
        };
        let ours = fresh.labels().contains_key(CREATOR_LABEL);
        if !ours {
            return Err(Fault::Stale);
        }
        if Box::pin(self.is_occupied(job)).await? {
            return self.remove_finalizer(job, false, done).await;
        }
        self.still_permitted()?;
        let preconditions = Preconditions {
            uid: fresh.metadata.uid.clone(),
            resource_version: fresh.metadata.resource_version.clone(),
        };
        let params = DeleteParams {
            preconditions: Some(preconditions),
            ..DeleteParams::default()
        };
        match in_time(
            "deleting the workspace",
            effect!("workspace.delete", api.delete(name, &params)),
        )
        .await
        {
            Ok(_) => {
                let message = format!("deleting namespace {name}");
                let told = Told {
                    warning: false,
                    reason: "WorkspaceDeleted",
                    message,
                };
                self.tell(&job.subject, told);
                // The watch shows it terminating, and then gone; until then there is nothing to do.
                Err(Fault::Stale)
            }
            Err(fault) => Err(fault),
        }
    }

    pub(super) fn still_permitted(&self) -> Result<(), Fault> {
        let permitted = self.stop.is_open() && self.hold.get().may_start(Boot::now());
        if permitted { Ok(()) } else { Err(Fault::Stale) }
    }
}

/// Of a CRD whose finalizer somebody has taken off, etcd keeps the objects; made anew, it shows them again, all
/// deleted.
fn with_a_former_crd() -> String {
    format!(
        "this Tenant was deleted before its CRD was made, so it went with a former one, and nothing is uninstalled: to let go of it and keep the release, annotate it with {}=true",
        names::ORPHAN_ANNOTATION
    )
}

/// Whether the newest that home wants is that the deployment goes, in the way that was planned: it may have
/// been taken back while this waited for its turn.
fn still_ordered(order: &DesiredDeployment, retire: bool, now: &DesiredState) -> bool {
    let newest = now
        .deployments
        .iter()
        .find(|newest| newest.uid == order.uid && newest.key() == order.key());
    let ordered = |newest: &DesiredDeployment| {
        (newest.remove || (retire && now.retire))
            && newest.remove == order.remove
            && newest.orphan == order.orphan
            && !newest.paused
    };
    newest.is_some_and(ordered) && !now.paused
}

impl Fault {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Shown { message, .. } | Self::Passing(message) | Self::Refused(message) => {
                message
            }
            Self::Stale => "changed meanwhile",
        }
    }
}

fn unavailable(error: &HelmError) -> Fault {
    Fault::Shown {
        reason: reason::HELM_UNAVAILABLE,
        message: chain(error),
        permanent: false,
    }
}

fn suspended(message: String) -> Fault {
    Fault::Shown {
        reason: reason::SUSPENDED,
        message,
        permanent: false,
    }
}

/// A request that was refused, or that did not get through.
fn unanswered(what: &str, error: &kube::Error) -> Fault {
    let message = format!("{what}: {}", chain(error));
    match error {
        kube::Error::Api(status) if matches!(status.code, 400 | 403 | 405 | 413 | 415 | 422) => {
            Fault::Refused(message)
        }
        _ => Fault::Passing(message),
    }
}

/// The call is put aside, as it is large and each Tenant that waits for helm would carry room for it.
fn in_time<T>(
    what: &str,
    call: impl Future<Output = kube::Result<T>>,
) -> impl Future<Output = Result<T, Fault>> {
    let call = tokio::time::timeout(DEADLINE, Box::pin(call));
    async move {
        match call.await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(kube::Error::Api(status))) if status.code == 409 || status.code == 404 => {
                Err(Fault::Stale)
            }
            Ok(Err(kube::Error::Api(status))) if is_suspended(&status.message) => {
                Err(suspended(status.message.clone()))
            }
            Ok(Err(error)) => Err(unanswered(what, &error)),
            Err(_) => Err(Fault::Passing(format!(
                "{what}: no answer within {} s",
                DEADLINE.as_secs()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use krypton_common::desired::Version;

    use super::*;

    fn desired(deployments: Vec<DesiredDeployment>) -> DesiredState {
        DesiredState {
            version: Version::default(),
            chart: ChartState {
                repo: String::new(),
                name: "small".to_owned(),
                version: String::new(),
                install_crds: false,
                values: serde_json::Map::new(),
                confidential: None,
                pinned: None,
            },
            paused: false,
            retire: false,
            drift: krypton_common::drift::DriftPolicy::default(),
            chart_crds: CrdPolicy::default(),
            tenant_values: false,
            handling: krypton_common::handling::Handling::default(),
            lockdown: krypton_common::lockdown::Lockdown::default(),
            namespaces: krypton_common::namespaces::NamespaceConfiguration::default(),
            deployments,
            placed: Vec::new(),
        }
    }

    #[test]
    fn a_deployment_goes_only_while_the_newest_that_home_wants_is_that_very_order() {
        let order = DesiredDeployment {
            namespace: "accounts".to_owned(),
            name: "acme".to_owned(),
            uid: "uid-1".to_owned(),
            remove: true,
            ..DesiredDeployment::default()
        };
        let with = |change: fn(&mut DesiredDeployment)| {
            let mut newest = order.clone();
            change(&mut newest);
            still_ordered(&order, false, &desired(vec![newest]))
        };
        assert!(with(|_| {}));
        assert!(with(|newest| newest.generation += 1));
        assert!(!with(|newest| newest.remove = false));
        assert!(!with(|newest| newest.orphan = true));
        assert!(!with(|newest| newest.paused = true));
        assert!(!with(|newest| newest.uid = "uid-2".to_owned()));
        assert!(!with(|newest| newest.namespace = "other".to_owned()));
        let mut now = desired(Vec::new());
        assert!(!still_ordered(&order, false, &now), "no list says nothing");
        now.deployments.push(order.clone());
        now.paused = true;
        assert!(!still_ordered(&order, false, &now));

        // With the whole member, until that is taken back.
        let stays = DesiredDeployment {
            remove: false,
            ..order
        };
        let mut now = desired(vec![stays.clone()]);
        assert!(!still_ordered(&stays, true, &now));
        now.retire = true;
        assert!(still_ordered(&stays, true, &now));
    }

    #[test]
    fn answers_that_repeat_are_refusals() {
        let answered = |code: u16| {
            let status = kube::core::Status {
                code,
                message: "no".to_owned(),
                ..kube::core::Status::default()
            };
            unanswered("writing", &kube::Error::Api(Box::new(status)))
        };
        for code in [400, 403, 405, 413, 415, 422] {
            assert!(matches!(answered(code), Fault::Refused(_)), "{code}");
        }
        for code in [401, 429, 500, 503] {
            assert!(matches!(answered(code), Fault::Passing(_)), "{code}");
        }
    }
}
