//! A loopback port that stays ours while nobody listens on it.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use anyhow::{Context, Result};
use tokio::net::TcpSocket;

/// A port of 127.0.0.1, held until dropped.
///
/// It is bound with SO_REUSEADDR but does not listen: the kernel gives it to nobody else, neither
/// for port 0 nor for an outgoing connection, and refuses connections to it, while a server that
/// names the port (Go's and Rust's set SO_REUSEADDR) can listen on it, again and again.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    _held: Option<TcpSocket>,
}

impl Port {
    /// Takes a free port.
    ///
    /// # Errors
    /// When the machine has none left.
    pub fn reserve() -> Result<Self> {
        let take = || -> io::Result<Self> {
            let socket = TcpSocket::new_v4()?;
            socket.set_reuseaddr(true)?;
            socket.bind((Ipv4Addr::LOCALHOST, 0).into())?;
            Ok(Self {
                address: socket.local_addr()?,
                _held: Some(socket),
            })
        };
        take().context("reserving a free port of 127.0.0.1")
    }

    /// One that another process holds.
    pub(crate) fn held_elsewhere(number: u16) -> Self {
        Self {
            address: (Ipv4Addr::LOCALHOST, number).into(),
            _held: None,
        }
    }

    pub fn number(&self) -> u16 {
        self.address.port()
    }

    /// `127.0.0.1:<port>`.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether a server could listen now: nobody else does.
    pub fn is_free(&self) -> bool {
        std::net::TcpListener::bind(self.address).is_ok()
    }

    /// Listens on the port; dropping the listener leaves the port reserved.
    ///
    /// # Errors
    /// When somebody listens on it already.
    pub fn listen(&self) -> Result<std::net::TcpListener> {
        let listen = || {
            let listener = std::net::TcpListener::bind(self.address)?;
            listener.set_nonblocking(true)?;
            Ok::<_, io::Error>(listener)
        };
        listen().with_context(|| format!("listening on {}", self.address))
    }
}
