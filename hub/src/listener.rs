//! STUB
use crate::authority::AgentCertificate;
use std::net::SocketAddr;
#[derive(Clone, Debug)]
pub struct Peer {
    pub address: SocketAddr,
    pub certificate: Result<AgentCertificate, String>,
}
