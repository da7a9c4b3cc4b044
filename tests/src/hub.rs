//! Runs the real hub binary against a home cluster.

use std::{
    collections::BTreeMap,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Result;

use crate::{
    daemon::{Daemon, DaemonStart, Program},
    port::Port,
    wait::STEP_DEADLINE,
};

const PROGRAM: Program = Program {
    name: "krypton-hub",
    variable: "KRYPTON_HUB_BIN",
};

/// How to start a hub.
#[derive(Debug, Clone)]
pub struct HubOptions<'a> {
    /// Kubeconfig of the home cluster.
    pub home: &'a Path,
    /// Appended to the harness's flags. A flag given here replaces the harness's flag of the same name.
    pub args: Vec<String>,
    /// The complete environment, except KUBECONFIG, PATH and TMPDIR.
    pub env: BTreeMap<String, String>,
    listen: Option<Arc<Port>>,
    disk_size: Option<u64>,
}

impl<'a> HubOptions<'a> {
    pub fn new(home: &'a Path) -> Self {
        Self {
            home,
            args: Vec::new(),
            env: BTreeMap::new(),
            listen: None,
            disk_size: None,
        }
    }

    /// Limits the disk for scratch files to this number of bytes. Requires a kernel that allows user namespaces.
    #[must_use]
    pub fn with_disk_size(mut self, bytes: u64) -> Self {
        self.disk_size = Some(bytes);
        self
    }

    /// Listens on the port of a stopped hub, so its agents find this one.
    #[must_use]
    pub fn on_port_of(mut self, hub: &Hub) -> Self {
        self.listen = Some(Arc::clone(&hub.listen));
        self
    }

    /// Listens on this port. The port can be published before the hub starts.
    #[must_use]
    pub fn on_port(mut self, port: &Arc<Port>) -> Self {
        self.listen = Some(Arc::clone(port));
        self
    }

    #[must_use]
    pub fn args<A: Into<String>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }
}

/// A running hub with its own port for agents. The port outlives the hub, so a successor can use it.
#[derive(Debug)]
pub struct Hub {
    daemon: Daemon,
    listen: Arc<Port>,
}

impl Hub {
    /// Returns the path of the hub binary, which is also the supervisor that runs Helm.
    pub fn program() -> Result<PathBuf> {
        PROGRAM.find()
    }

    /// Starts the hub binary from `KRYPTON_HUB_BIN`, or from the directory of this executable.
    ///
    /// Doesn't wait until the hub is ready: use `wait_ready`. Use `wait` if the test expects a refusal.
    pub fn start(options: &HubOptions<'_>) -> Result<Self> {
        let listen = match &options.listen {
            Some(port) => Arc::clone(port),
            None => Arc::new(Port::reserve()?),
        };
        let address = listen.address().to_string();
        let mut env: BTreeMap<_, _> = options
            .env
            .iter()
            .map(|(name, value)| (name.clone(), value.into()))
            .collect();
        env.insert("KUBECONFIG".to_owned(), options.home.into());
        let daemon = Daemon::start(DaemonStart {
            program: PROGRAM,
            flags: vec![
                ("--listen", address.clone().into()),
                ("--advertise", address.into()),
                // All clusters of the harness listen on loopback.
                ("--insecure-kubeconfig-loopback", "true".into()),
            ],
            cache_flag: None,
            args: &options.args,
            env,
            disk: options.disk_size,
            is_contained: false,
        })?;
        Ok(Self { daemon, listen })
    }

    /// Like `start`. Waits until the hub is ready.
    pub async fn start_ready(options: &HubOptions<'_>) -> Result<Self> {
        let mut hub = Self::start(options)?;
        hub.wait_ready(STEP_DEADLINE).await?;
        Ok(hub)
    }

    /// Returns the address of the port for agents.
    pub fn agents_address(&self) -> std::net::SocketAddr {
        self.listen.address()
    }
}

// A hub and an agent differ only in how they start.
impl Deref for Hub {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl DerefMut for Hub {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}
