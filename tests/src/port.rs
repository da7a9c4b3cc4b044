//! Reserves a loopback port, also while no process listens on it.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use anyhow::{Context, Result};
use tokio::net::TcpSocket;

/// A port of 127.0.0.1, reserved until dropped.
///
/// The port is bound with SO_REUSEADDR but doesn't listen. The kernel assigns it to no other socket, neither for port 0
/// nor for an outgoing connection, and refuses connections to it. A server that binds the port explicitly with
/// SO_REUSEADDR, as Go and Rust do, can listen on it repeatedly.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    _held: Option<TcpSocket>,
}

impl Port {
    /// Reserves a free port.
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

    /// Returns a port that another process has reserved.
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

    /// Returns true if a server can listen on the port now.
    pub fn is_free(&self) -> bool {
        std::net::TcpListener::bind(self.address).is_ok()
    }

    /// Listens on the port. Dropping the listener leaves the port reserved.
    pub fn listen(&self) -> Result<std::net::TcpListener> {
        let listen = || {
            let listener = std::net::TcpListener::bind(self.address)?;
            listener.set_nonblocking(true)?;
            Ok::<_, io::Error>(listener)
        };
        listen().with_context(|| format!("listening on {}", self.address))
    }
}
