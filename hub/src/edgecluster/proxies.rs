//! The proxies of members, one for each source.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use krypton_types::allowed_namespaces::Allowed;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::members::member::Member;
use crate::proxy::{self, Access, Inputs, Permit, Shared};

/// A member's proxy.
pub(super) struct Running {
    pub(super) access: watch::Sender<Access>,
    pub(super) permit: watch::Sender<Permit>,
    pub(super) allowed: watch::Sender<Allowed>,
    pub(super) stop: CancellationToken,
    pub(super) task: JoinHandle<()>,
}

#[derive(Default)]
pub(super) struct Proxies {
    pub(super) running: BTreeMap<String, Running>,
    /// Members whose proxy is stopping.
    gone: BTreeSet<String>,
    leaving: JoinSet<String>,
}

impl Proxies {
    /// Whether a proxy of the member is stopping.
    pub(super) fn is_leaving(&self, name: &str) -> bool {
        self.gone.contains(name)
    }

    /// Gives the member's proxy the access to its cluster. Starts a proxy if the member has none.
    pub(super) fn reach(
        &mut self,
        name: &str,
        access: Access,
        shared: &Arc<Shared>,
        member: impl FnOnce() -> Arc<Member>,
    ) {
        if let Some(proxy) = self.running.get(name) {
            update(&proxy.access, access);
        } else if !self.gone.contains(name) {
            let proxy = start(shared, name, access, &member());
            self.running.insert(name.to_owned(), proxy);
        }
    }

    /// Stops the proxies that are not to stay.
    pub(super) fn retain(&mut self, stays: impl Fn(&str) -> bool) {
        let departed = self.running.extract_if(.., |name, _| !stays(name));
        for (name, proxy) in departed {
            tracing::info!(member = %name, "stopping proxy; releases stay installed");
            proxy.stop.cancel();
            self.gone.insert(name.clone());
            self.leaving.spawn(async move {
                joined(&name, proxy.task).await;
                name
            });
        }
    }

    /// The next member whose proxy has stopped. Waits for ever where none is stopping.
    pub(super) async fn ended(&mut self) -> Option<String> {
        match self.leaving.join_next().await {
            Some(Ok(name)) => {
                self.gone.remove(&name);
                Some(name)
            }
            Some(Err(_)) => None,
            None => std::future::pending().await,
        }
    }

    /// Stops all, and waits for them.
    pub(super) async fn stop(mut self) {
        for proxy in self.running.values() {
            proxy.stop.cancel();
        }
        for (name, proxy) in self.running {
            joined(&name, proxy.task).await;
        }
        while self.leaving.join_next().await.is_some() {}
    }
}

async fn joined(name: &str, task: JoinHandle<()>) {
    if let Err(error) = task.await {
        tracing::error!(member = %name, %error, "the proxy ended badly");
    }
}

fn start(shared: &Arc<Shared>, name: &str, access: Access, member: &Member) -> Running {
    let (access, access_rx) = watch::channel(access);
    let (permit, permit_rx) = watch::channel(Permit::default());
    let (allowed, allowed_rx) = watch::channel(Allowed::default());
    let stop = CancellationToken::new();
    let inputs = Inputs {
        access: access_rx,
        permit: permit_rx,
        published: member.published.subscribe(),
        presence: shared.members.presence(name),
        allowed: allowed_rx,
    };
    let following = proxy::run(name.to_owned(), Arc::clone(shared), inputs, stop.clone());
    let span = tracing::error_span!("proxy", member = name);
    let watched = format!("the proxy of member {name}");
    let following = shared.watchdog.watch(watched, following);
    let task = tokio::spawn(following.instrument(span));
    Running {
        access,
        permit,
        allowed,
        stop,
        task,
    }
}

/// Ignores a kubeconfig of the same content.
fn update(channel: &watch::Sender<Access>, access: Access) {
    channel.send_if_modified(|before| {
        let changed = match (&*before, &access) {
            (Access::Kubeconfig(a, before), Access::Kubeconfig(b, after)) => {
                a != b || before != after
            }
            (Access::Home(_), Access::Home(_)) => false,
            _ => true,
        };
        if changed {
            *before = access;
        }
        changed
    });
}
