//! The real hub binary against a home cluster.

use std::{
    collections::BTreeMap,
    ops::{Deref, DerefMut},
    path::Path,
    sync::Arc,
};

use anyhow::Result;

use crate::{
    daemon::{Daemon, Program, Start},
    port::Port,
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
    /// After the harness' own, which are left out where one of these is the same flag.
    pub args: Vec<String>,
    /// All of its environment but KUBECONFIG, PATH and TMPDIR.
    pub env: BTreeMap<String, String>,
    listen: Option<Arc<Port>>,
    disk: Option<u64>,
}

impl<'a> HubOptions<'a> {
    pub fn new(home: &'a Path) -> Self {
        Self {
            home,
            args: Vec::new(),
            env: BTreeMap::new(),
            listen: None,
            disk: None,
        }
    }

    /// With a disk of so many bytes for its scratch files. The kernel must allow user namespaces.
    #[must_use]
    pub fn on_a_disk_of(mut self, bytes: u64) -> Self {
        self.disk = Some(bytes);
        self
    }

    /// Listens where that hub did, which has ended, so that its agents find this one.
    #[must_use]
    pub fn in_place_of(mut self, hub: &Hub) -> Self {
        self.listen = Some(Arc::clone(&hub.listen));
        self
    }

    /// Listens there. Others may be told of it before.
    #[must_use]
    pub fn at(mut self, port: &Arc<Port>) -> Self {
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

/// A running hub: a `Daemon` that agents find at a port of its own, which outlives it where another
/// takes its place.
#[derive(Debug)]
pub struct Hub {
    daemon: Daemon,
    listen: Arc<Port>,
}

impl Hub {
    /// Starts the hub of `KRYPTON_HUB_BIN`, or the one that cargo has put beside this executable.
    /// Does not wait for it to be ready: see `ready`, and `wait` for one that is to refuse.
    ///
    /// # Errors
    /// When there is no such binary, saying what builds it, or it cannot be started.
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
        let daemon = Daemon::start(Start {
            program: PROGRAM,
            flags: vec![
                ("--listen", address.clone().into()),
                ("--advertise", address.into()),
                // Where all clusters of the harness are.
                ("--insecure-kubeconfig-loopback", "true".into()),
            ],
            cache_flag: None,
            args: &options.args,
            env,
            disk: options.disk,
            contained: false,
        })?;
        Ok(Self { daemon, listen })
    }

    /// Where it listens for agents.
    pub fn agents_address(&self) -> std::net::SocketAddr {
        self.listen.address()
    }
}

// Nothing but the way it is started sets it apart from an agent.
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
