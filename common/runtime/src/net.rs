//! Connections between agents and hub. A process gets its network as a value.

use std::net::{Ipv4Addr, SocketAddr};
use std::{fmt, io};

use futures::future::BoxFuture;
use hyper_util::client::proxy::matcher::Intercept;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

use crate::admin::{self, AdminError, BindAddress};

/// Opens and accepts connections.
pub trait Network: fmt::Debug + Send + Sync {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<Stream>>;

    /// Returns the HTTP proxy for connections to `address` (`HOST:PORT`), if there is one.
    fn proxy(&self, _address: &str) -> Option<Intercept> {
        None
    }

    /// Listens on `address`, by default in the machine's network. Errors name `flag`.
    fn listen<'a>(
        &'a self,
        flag: &'static str,
        address: &'a BindAddress,
    ) -> BoxFuture<'a, Result<Listener, AdminError>> {
        Box::pin(async move { Ok(Box::new(admin::bind(flag, address).await?) as Listener) })
    }

    /// Listens on any port of the host's loopback address.
    fn listen_on_loopback(&self) -> BoxFuture<'_, io::Result<Listener>> {
        Box::pin(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            Ok(Box::new(listener) as Listener)
        })
    }
}

/// The network of the machine. Its connections send small writes immediately.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

impl Network for Tcp {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<Stream>> {
        Box::pin(async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Stream)
        })
    }
}

/// A connection.
pub type Stream = Box<dyn Duplex>;

/// A byte stream in both directions.
pub trait Duplex: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin> Duplex for T {}

/// A source of connections.
pub type Listener = Box<dyn Accept>;

/// Accepts connections.
pub trait Accept: fmt::Debug + Send + Sync {
    /// Returns the next connection and its peer, as an IPv4 address if it is one. Cancel-safe.
    fn accept(&self) -> BoxFuture<'_, io::Result<(Stream, SocketAddr)>>;

    /// Returns the address on which it listens.
    fn local_addr(&self) -> io::Result<SocketAddr>;
}

impl Accept for TcpListener {
    fn accept(&self) -> BoxFuture<'_, io::Result<(Stream, SocketAddr)>> {
        Box::pin(async move {
            let (stream, peer) = Self::accept(self).await?;
            // An error on a closed connection shows up at the next read.
            drop(stream.set_nodelay(true));
            Ok((Box::new(stream) as Stream, canonical(peer)))
        })
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Self::local_addr(self)
    }
}

/// Returns an IPv4 address in its own form. A listener for both families returns it as `::ffff:10.0.0.1`.
fn canonical(peer: SocketAddr) -> SocketAddr {
    let mapped = match peer {
        SocketAddr::V6(peer) => peer.ip().to_ipv4_mapped(),
        SocketAddr::V4(_) => None,
    };
    mapped.map_or(peer, |ip| (ip, peer.port()).into())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[test]
    fn only_mapped_addresses_become_ipv4() {
        for (peer, expected) in [
            ("[::ffff:10.244.0.1]:59621", "10.244.0.1:59621"),
            ("10.244.0.1:59621", "10.244.0.1:59621"),
            ("[fe80::1%2]:443", "[fe80::1%2]:443"),
            ("[::1]:443", "[::1]:443"),
        ] {
            let peer: SocketAddr = peer.parse().unwrap();
            assert_eq!(canonical(peer).to_string(), expected);
        }
    }

    #[tokio::test]
    async fn dialed_stream_carries_bytes_to_accepted_one() {
        let loopback = "127.0.0.1:0".parse().unwrap();
        let listener = Tcp.listen("--listen", &loopback).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (dialed, accepted) = tokio::join!(Tcp.connect(address), listener.accept());
        let (mut from, (mut to, _)) = (dialed.unwrap(), accepted.unwrap());
        from.write_all(b"hello").await.unwrap();
        from.shutdown().await.unwrap();
        let mut text = String::new();
        to.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "hello");
    }
}
