//! ClusterProfiles of the Cluster Inventory API, in one namespace or in all. A program in the hub's image,
//! named in the provider file, issues the credential of each profile. The hub keeps a credential until it
//! expires.

mod access_plan;
pub(crate) mod credential;
mod plugin;
mod profile;
pub mod provider_file;
mod state;
mod token_file;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::watch::store::Key;
use krypton_runtime::watchdog::Watchdog;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{self, Policy};
use kube::Client;
use kube::api::DynamicObject;
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use super::provider::{self, ProviderState, WatchedObjects};
use super::{Origin, Provider, ProviderHandle, Source, SourceKind};
use access_plan::Plan;
use credential::Credential;
use plugin::Plugins;
use profile::Profile;
use provider_file::ProviderFile;
use state::{CredentialLifetime, DueWork, ProfileState, WorkingAccess};
use token_file::TokenFile;

/// Access to the clusters of all profiles, shared by the providers of several namespaces.
#[derive(Debug)]
pub struct ProfileAccess {
    /// `None` if the hub was started without a file.
    file: watch::Receiver<Option<Arc<ProviderFile>>>,
    plugins: Plugins,
    /// Private directory for tokens and for the working directories of running programs.
    folder: PathBuf,
    policy: Policy,
}

impl ProfileAccess {
    /// Follows the file, whose first content is `first`. Must be called inside a tokio runtime.
    pub fn start(
        watchdog: &Watchdog,
        path: Option<&Path>,
        first: Option<ProviderFile>,
        scratch: &Path,
        policy: Policy,
    ) -> io::Result<Arc<Self>> {
        let (tx, file) = watch::channel(first.map(Arc::new));
        if let Some(path) = path {
            let following = provider_file::follow(path.to_owned(), tx);
            tokio::spawn(watchdog.watch("the file of access providers", following));
        }
        Self::new(file, scratch, policy)
    }

    fn new(
        file: watch::Receiver<Option<Arc<ProviderFile>>>,
        scratch: &Path,
        policy: Policy,
    ) -> io::Result<Arc<Self>> {
        // Clients and Helm run in other working directories.
        let folder = std::path::absolute(scratch)?.join("cluster-profiles");
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)?;
        Ok(Arc::new(Self {
            file,
            plugins: Plugins::new(folder.clone()),
            folder,
            policy,
        }))
    }

    /// Runs the program of a plan and returns the credential without using it.
    async fn run(&self, plan: &Plan) -> Result<Credential, String> {
        let output = self.plugins.run(&plan.command).await;
        let output = output.map_err(|error| chain(&*error))?;
        credential::read(&output, plan.command.api_version)
            .map_err(|error| format!("{}: {error}", plan.command.program))
    }

    /// Builds the access for clients from a credential. If the previous access has the same plan, its token
    /// file gets the new token, so the kubeconfig stays the same.
    fn build_access(
        &self,
        plan: &Arc<Plan>,
        credential: Credential,
        lifetime: CredentialLifetime,
        previous: Option<&WorkingAccess>,
    ) -> Result<WorkingAccess, String> {
        let token_error = |error: io::Error| format!("keeping its token failed: {error}");
        let previous = previous
            .filter(|previous| previous.plan == *plan)
            .and_then(|previous| previous.token_file.clone());
        let token_file = match (&credential.token, previous) {
            (None, _) => None,
            (Some(token), Some(file)) => {
                file.replace(token).map_err(token_error)?;
                Some(file)
            }
            (Some(token), None) => {
                // A token file belongs to one plan: a client for a different server must never read its
                // token.
                let file = TokenFile::write(&self.folder, token).map_err(token_error)?;
                Some(Arc::new(file))
            }
        };
        // The cluster has passed the sanitizer with the hub's policy. The hub itself creates the user.
        let policy = Policy {
            allow_token_file: true,
            ..self.policy
        };
        let user = user(&credential, token_file.as_deref().map(TokenFile::path));
        let document = access_plan::document(&plan.cluster, &Value::Object(user));
        let access = kubeconfig::parse(document.as_bytes(), &policy).map_err(|error| {
            format!(
                "its credential cannot be used: {}",
                chain(&error).replace("users[0].", "")
            )
        })?;
        Ok(WorkingAccess {
            plan: Arc::clone(plan),
            credential,
            access: Arc::new(access),
            token_file,
            lifetime,
        })
    }
}

fn user(credential: &Credential, token_file: Option<&Path>) -> Map<String, Value> {
    let mut user = Map::new();
    if let Some(path) = token_file {
        user.insert("tokenFile".to_owned(), path.to_string_lossy().into());
    }
    if let Some((certificate, key)) = &credential.certificate {
        let certificate = STANDARD.encode(certificate);
        user.insert("client-certificate-data".to_owned(), certificate.into());
        user.insert("client-key-data".to_owned(), STANDARD.encode(key).into());
    }
    user
}

/// Provider of the ClusterProfiles of one namespace, or of all.
pub(crate) struct ClusterProfiles {
    pub client: Client,
    /// `None` means all namespaces.
    pub namespace: Option<String>,
    pub access: Arc<ProfileAccess>,
}

impl Provider for ClusterProfiles {
    fn describe(&self) -> String {
        let namespace = self.namespace.as_deref().unwrap_or("*");
        format!("ClusterProfiles {namespace}/*")
    }

    fn covers(&self, origin: &Origin) -> bool {
        origin.is_in(SourceKind::ClusterProfile, self.namespace.as_ref())
    }

    fn follow(self: Arc<Self>, handle: ProviderHandle) -> BoxFuture<'static, ()> {
        let namespace = self.namespace.as_deref();
        let read = |object| Profile::read(&object);
        let profiles = ProfileList {
            file: self.access.file.clone(),
            file_changes: true,
            profiles: WatchedObjects::objects(&self.client, namespace, profile::API, read),
            states: ProfileStates::default(),
            wake: None,
            access: Arc::clone(&self.access),
        };
        provider::run(profiles, handle).boxed()
    }
}

/// The listed profiles, their members, and the provider file.
struct ProfileList {
    access: Arc<ProfileAccess>,
    file: watch::Receiver<Option<Arc<ProviderFile>>>,
    /// Whether the file may still change.
    file_changes: bool,
    profiles: WatchedObjects<DynamicObject, Profile>,
    states: ProfileStates,
    /// When the next work is due.
    wake: Option<BootTime>,
}

impl ProfileList {
    fn follow(&mut self) {
        if let Some(known) = self.profiles.known() {
            self.states
                .follow(known, self.file.get(), &self.access.policy);
        }
    }
}

impl ProviderState for ProfileList {
    async fn changed(&mut self) -> bool {
        let now = BootTime::now();
        tokio::select! {
            () = self.profiles.changed() => self.follow(),
            result = self.file.changed(), if self.file_changes => {
                self.file_changes = result.is_ok();
                self.follow();
            }
            Some(finished) = self.states.runs.join_next(), if !self.states.runs.is_empty() => {
                // Otherwise the run was aborted together with its profile.
                if let Ok((key, plan, credential)) = finished {
                    self.states.finish_run(&self.access, &key, &plan, credential);
                }
            }
            () = clock::sleep_until(self.wake, now) => {}
        }
        self.wake = self.states.start_due_work(&self.access, BootTime::now());
        true
    }

    async fn reread(&mut self, origin: &Origin) {
        let now = BootTime::now();
        if self.states.credential_rejected(origin, now) {
            self.wake = self.states.start_due_work(&self.access, now);
        }
    }

    fn sources(&mut self) -> Option<BTreeMap<Origin, Arc<Source>>> {
        self.profiles.known()?;
        Some(self.states.sources(BootTime::now()))
    }

    fn trouble(&self) -> Option<String> {
        self.profiles.trouble()
    }
}

type FinishedRun = (Key, Arc<Plan>, Result<Credential, String>);

/// The known profiles, and at most one running program for each.
#[derive(Default)]
struct ProfileStates {
    states: BTreeMap<Key, ProfileState>,
    /// The provider file that the plans are based on.
    file: Option<Arc<ProviderFile>>,
    runs: JoinSet<FinishedRun>,
    running: BTreeMap<Key, AbortHandle>,
}

impl ProfileStates {
    /// Takes over the listed profiles and the file.
    fn follow(
        &mut self,
        known: &BTreeMap<Key, Profile>,
        file: Option<Arc<ProviderFile>>,
        policy: &Policy,
    ) {
        let gone = self.states.keys().filter(|key| !known.contains_key(*key));
        let gone: Vec<Key> = gone.cloned().collect();
        let file_changed = file != self.file;
        self.file = file;
        for key in gone {
            self.forget(&key);
        }
        for (key, profile) in known {
            let state = self.states.get(key);
            if file_changed || state.is_none_or(|state| state.profile != *profile) {
                self.update(key, profile, policy);
            }
        }
    }

    fn update(&mut self, key: &Key, profile: &Profile, policy: &Policy) {
        let plan = access_plan::plan(profile, self.file.as_deref(), policy);
        match self.states.get_mut(key) {
            // A recreated profile with the same name is a different profile.
            Some(state) if state.profile.source.uid == profile.source.uid => {
                state.profile = profile.clone();
                state.set_plan(plan);
            }
            _ => {
                self.forget(key);
                self.states
                    .insert(key.clone(), ProfileState::new(profile.clone(), plan));
            }
        }
    }

    /// Removes a profile and aborts its running program.
    fn forget(&mut self, key: &Key) {
        if let Some(run) = self.running.remove(key) {
            run.abort();
        }
        self.states.remove(key);
    }

    fn credential_rejected(&mut self, origin: &Origin, now: BootTime) -> bool {
        let key = (
            origin.namespace.clone().unwrap_or_default(),
            origin.name.clone(),
        );
        let state = self.states.get_mut(&key);
        state.map(|state| state.credential_rejected(now)).is_some()
    }

    /// Starts all due work and returns when to check again.
    fn start_due_work(&mut self, access: &Arc<ProfileAccess>, now: BootTime) -> Option<BootTime> {
        let mut wakes = Vec::new();
        for (key, state) in &mut self.states {
            let plan = state.plan();
            if state.due(now) == DueWork::Rebuild
                && let (Some(plan), Some(working)) = (&plan, state.working_access().cloned())
            {
                let (credential, lifetime) = (working.credential.clone(), working.lifetime);
                let built = access.build_access(plan, credential, lifetime, Some(&working));
                if let Err(problem) = &built {
                    tracing::warn!(origin = %state.profile.source.origin, provider = plan.command.provider, problem, "failed to use the credential; retrying");
                }
                state.rebuild_finished(built, now, chance::random());
            }
            wakes.extend(state.next_expiry(now));
            match (state.due(now), plan) {
                (DueWork::At(at), _) => wakes.push(at),
                (DueWork::Run, Some(plan)) => {
                    state.run_started(now);
                    let (run_key, access) = (key.clone(), Arc::clone(access));
                    let run = self.runs.spawn(async move {
                        let credential = access.run(&plan).await;
                        (run_key, plan, credential)
                    });
                    self.running.insert(key.clone(), run);
                }
                _ => {}
            }
        }
        wakes.into_iter().min()
    }

    fn finish_run(
        &mut self,
        access: &ProfileAccess,
        key: &Key,
        plan: &Arc<Plan>,
        credential: Result<Credential, String>,
    ) {
        let Some(state) = self.states.get_mut(key) else {
            return;
        };
        self.running.remove(key);
        let (now, jitter) = (BootTime::now(), chance::random());
        if state.plan().as_ref() != Some(plan) {
            state.run_discarded();
            return;
        }
        let outcome = credential.and_then(|credential| {
            let lifetime =
                CredentialLifetime::from_expiry(credential.expires, clock::wall(), now, jitter)
                    .ok_or_else(|| {
                        let program = &plan.command.program;
                        format!("{program} returned an expired credential")
                    })?;
            access.build_access(plan, credential, lifetime, state.working_access())
        });
        if let Err(problem) = &outcome {
            tracing::warn!(origin = %state.profile.source.origin, provider = plan.command.provider, problem, "no new credential; retrying");
        }
        state.run_finished(outcome, now, jitter);
    }

    fn sources(&mut self, now: BootTime) -> BTreeMap<Origin, Arc<Source>> {
        let source = |state: &mut ProfileState| {
            let (access, stale) = state.access(now);
            let source = Source {
                access,
                stale,
                ..state.profile.source.clone()
            };
            (source.origin.clone(), Arc::new(source))
        };
        self.states.values_mut().map(source).collect()
    }
}

#[cfg(test)]
mod tests;
