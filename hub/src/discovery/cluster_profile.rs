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

use super::provider::{self, Discovery, Listed};
use super::{Finds, Kind, Origin, Provider, Source};
use access_plan::Plan;
use credential::Credential;
use plugin::{Limits, Plugins};
use profile::Profile;
use provider_file::ProviderFile;
use state::{Due, Good, Life, ProfileState};
use token_file::TokenFile;

/// Access to the clusters of all profiles, shared by the providers of several namespaces.
#[derive(Debug)]
pub struct Access {
    /// `None` if the hub was started without a file.
    file: watch::Receiver<Option<Arc<ProviderFile>>>,
    plugins: Plugins,
    /// Private directory for tokens and for the working directories of running programs.
    folder: PathBuf,
    policy: Policy,
}

impl Access {
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
        Self::new(file, scratch, policy, Limits::default())
    }

    fn new(
        file: watch::Receiver<Option<Arc<ProviderFile>>>,
        scratch: &Path,
        policy: Policy,
        limits: Limits,
    ) -> io::Result<Arc<Self>> {
        // Clients and Helm run in other working directories.
        let folder = std::path::absolute(scratch)?.join("cluster-profiles");
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)?;
        Ok(Arc::new(Self {
            file,
            plugins: Plugins::new(folder.clone(), limits),
            folder,
            policy,
        }))
    }

    /// Runs the program of a plan and returns the credential without using it.
    async fn run(&self, plan: &Plan) -> Result<Credential, String> {
        let ran = self.plugins.run(&plan.command).await;
        let answer = ran.map_err(|error| chain(&error))?;
        credential::read(&answer, plan.command.api_version)
            .map_err(|error| format!("{}: {}", plan.command.program, chain(&error)))
    }

    /// Builds the access for clients from a credential. If the previous access has the same plan, its token
    /// file gets the new token, so the kubeconfig stays the same.
    fn build_access(
        &self,
        plan: &Arc<Plan>,
        credential: Credential,
        life: Life,
        before: Option<&Good>,
    ) -> Result<Good, String> {
        let keeping = |error: io::Error| format!("keeping its token failed: {error}");
        let before = before
            .filter(|before| before.plan == *plan)
            .and_then(|before| before.token_file.clone());
        let token_file = match (&credential.token, before) {
            (None, _) => None,
            (Some(token), Some(file)) => {
                file.replace(token).map_err(keeping)?;
                Some(file)
            }
            (Some(token), None) => {
                // A token file belongs to one plan: a client for a different server must never read its
                // token.
                let file = TokenFile::write(&self.folder, token).map_err(keeping)?;
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
        Ok(Good {
            plan: Arc::clone(plan),
            credential,
            access: Arc::new(access),
            token_file,
            life,
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
pub struct ClusterProfiles {
    pub client: Client,
    /// `None` means all namespaces.
    pub namespace: Option<String>,
    pub access: Arc<Access>,
}

impl std::fmt::Debug for ClusterProfiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

impl Provider for ClusterProfiles {
    fn describe(&self) -> String {
        let namespace = self.namespace.as_deref().unwrap_or("*");
        format!("ClusterProfiles {namespace}/*")
    }

    fn covers(&self, origin: &Origin) -> bool {
        origin.is_in(Kind::ClusterProfile, self.namespace.as_ref())
    }

    fn follow(self: Arc<Self>, finds: Finds) -> BoxFuture<'static, ()> {
        let namespace = self.namespace.as_deref();
        let read = |object| Profile::read(&object);
        let profiles = ProfileList {
            file: self.access.file.clone(),
            file_follows: true,
            profiles: Listed::objects(&self.client, namespace, profile::API, read),
            members: Members::default(),
            wake: None,
            access: Arc::clone(&self.access),
        };
        provider::run(profiles, finds).boxed()
    }
}

/// The listed profiles, their members, and the provider file.
struct ProfileList {
    access: Arc<Access>,
    file: watch::Receiver<Option<Arc<ProviderFile>>>,
    /// Whether the file may still change.
    file_follows: bool,
    profiles: Listed<DynamicObject, Profile>,
    members: Members,
    /// When the next work is due.
    wake: Option<BootTime>,
}

impl ProfileList {
    fn follow(&mut self) {
        if let Some(known) = self.profiles.known() {
            self.members
                .follow(known, self.file.get(), &self.access.policy);
        }
    }
}

impl Discovery for ProfileList {
    async fn changed(&mut self) -> bool {
        let now = BootTime::now();
        tokio::select! {
            () = self.profiles.changed() => self.follow(),
            news = self.file.changed(), if self.file_follows => {
                self.file_follows = news.is_ok();
                self.follow();
            }
            Some(ended) = self.members.runs.join_next(), if !self.members.runs.is_empty() => {
                // Otherwise the run was aborted together with its profile.
                if let Ok((key, plan, answer)) = ended {
                    self.members.run_ended(&self.access, &key, &plan, answer);
                }
            }
            () = clock::sleep_until(self.wake, now) => {}
        }
        self.wake = self.members.start_due_work(&self.access, BootTime::now());
        true
    }

    async fn reread(&mut self, origin: &Origin) {
        let now = BootTime::now();
        if self.members.doubt(origin, now) {
            self.wake = self.members.start_due_work(&self.access, now);
        }
    }

    fn sources(&mut self) -> Option<BTreeMap<Origin, Arc<Source>>> {
        self.profiles.known()?;
        Some(self.members.sources(BootTime::now()))
    }

    fn trouble(&self) -> Option<String> {
        self.profiles.trouble()
    }
}

type EndedRun = (Key, Arc<Plan>, Result<Credential, String>);

/// The known profiles, and at most one running program for each.
#[derive(Default)]
struct Members {
    held: BTreeMap<Key, ProfileState>,
    /// The provider file that the plans are based on.
    file: Option<Arc<ProviderFile>>,
    runs: JoinSet<EndedRun>,
    running: BTreeMap<Key, AbortHandle>,
}

impl Members {
    /// Takes over the listed profiles. Returns whether one of them, or the file, has changed.
    fn follow(
        &mut self,
        known: &BTreeMap<Key, Profile>,
        file: Option<Arc<ProviderFile>>,
        policy: &Policy,
    ) -> bool {
        let gone = self.held.keys().filter(|key| !known.contains_key(*key));
        let gone: Vec<Key> = gone.cloned().collect();
        let mut changed = !gone.is_empty() || file != self.file;
        let all = file != self.file;
        self.file = file.clone();
        for key in gone {
            self.forget(&key);
        }
        for (key, profile) in known {
            let held = self.held.get(key);
            if all || held.is_none_or(|held| held.profile != *profile) {
                self.put(key, profile, file.as_deref(), policy);
                changed = true;
            }
        }
        changed
    }

    fn put(&mut self, key: &Key, profile: &Profile, file: Option<&ProviderFile>, policy: &Policy) {
        let wanted = access_plan::plan(profile, file, policy);
        match self.held.get_mut(key) {
            // A recreated profile with the same name is a different profile.
            Some(held) if held.profile.uid == profile.uid => {
                held.profile = profile.clone();
                held.want(wanted);
            }
            _ => {
                self.forget(key);
                self.held
                    .insert(key.clone(), ProfileState::new(profile.clone(), wanted));
            }
        }
    }

    /// Removes a profile and aborts its running program.
    fn forget(&mut self, key: &Key) {
        if let Some(run) = self.running.remove(key) {
            run.abort();
        }
        self.held.remove(key);
    }

    fn doubt(&mut self, origin: &Origin, now: BootTime) -> bool {
        let key = (
            origin.namespace.clone().unwrap_or_default(),
            origin.name.clone(),
        );
        let held = self.held.get_mut(&key);
        held.map(|held| held.doubt(now)).is_some()
    }

    /// Starts all due work and returns when to check again.
    fn start_due_work(&mut self, access: &Arc<Access>, now: BootTime) -> Option<BootTime> {
        let mut wake: Option<BootTime> = None;
        for (key, held) in &mut self.held {
            let Some(plan) = held.plan() else {
                wake = wake.into_iter().chain(held.expiry(now)).min();
                continue;
            };
            let mut due = held.due(now);
            if due == Due::Rebuild {
                let good = held.good().cloned();
                if let Some(good) = good {
                    let before = Some(&good);
                    let credential = good.credential.clone();
                    let built = access.build_access(&plan, credential, good.life, before);
                    if let Err(problem) = &built {
                        tracing::warn!(origin = %held.profile.origin, provider = plan.command.provider, problem, "failed to use the credential; retrying");
                    }
                    held.rebuilt(built, now, chance::random());
                }
                due = held.due(now);
            }
            match due {
                Due::Nothing | Due::Rebuild => {}
                Due::At(at) => wake = wake.into_iter().chain([at]).min(),
                Due::Run => {
                    held.started(now);
                    let (key, access) = (key.clone(), Arc::clone(access));
                    let of = key.clone();
                    let run = self.runs.spawn(async move {
                        let answer = access.run(&plan).await;
                        (key, plan, answer)
                    });
                    self.running.insert(of, run);
                }
            }
            wake = wake.into_iter().chain(held.expiry(now)).min();
        }
        wake
    }

    fn run_ended(
        &mut self,
        access: &Access,
        key: &Key,
        plan: &Arc<Plan>,
        answer: Result<Credential, String>,
    ) {
        let Some(held) = self.held.get_mut(key) else {
            return;
        };
        self.running.remove(key);
        let (now, jitter) = (BootTime::now(), chance::random());
        if held.plan().as_ref() != Some(plan) {
            held.dropped();
            return;
        }
        let outcome = answer.and_then(|credential| {
            let life =
                Life::of(credential.expires, clock::wall(), now, jitter).ok_or_else(|| {
                    let program = &plan.command.program;
                    format!("{program} has given a credential that has expired already")
                })?;
            access.build_access(plan, credential, life, held.good())
        });
        if let Err(problem) = &outcome {
            tracing::warn!(origin = %held.profile.origin, provider = plan.command.provider, problem, "no new credential; retrying");
        }
        held.ended(outcome, now, jitter);
    }

    fn sources(&mut self, now: BootTime) -> BTreeMap<Origin, Arc<Source>> {
        let source = |held: &mut ProfileState| {
            let (access, stale) = held.access(now);
            let profile = &held.profile;
            let source = Source {
                origin: profile.origin.clone(),
                uid: profile.uid.clone(),
                member: profile.member.clone(),
                since: profile.since,
                access,
                stale,
                suspended: None,
            };
            (profile.origin.clone(), Arc::new(source))
        };
        self.held.values_mut().map(source).collect()
    }
}

#[cfg(test)]
mod tests;
